"""The other side of safetensors_test.cpp: writes and reads safetensors files with nothing but the standard library.

    safetensors_files.py write FOLDER     random files, and FOLDER/manifest.txt: file, name (in hex), type, shape, data
                                          (in hex)
    safetensors_files.py read FILE OUT    the same lines of one file that pinflow wrote, and where its data begins
"""
import json
import os
import random
import struct
import sys

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
         "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8}
NAMES = ["weight", "layers.0.bias", "", "é", "a b", "quote\"", "line\nend", "\u0001", "slash/\\", "😀", "[1]:x"]


def line(file, name, dtype, shape, data):
    lengths = ",".join(str(length) for length in shape)
    return "\t".join([file, name.encode().hex(), dtype, lengths, data.hex()])


def count(shape):
    product = 1
    for length in shape:
        product *= length
    return product


def write(folder):
    generator = random.Random(20)
    lines = []
    for number in range(150):
        file = f"{number}.safetensors"
        tensors = []
        for name in generator.sample(NAMES, generator.randrange(len(NAMES))):
            dtype = generator.choice(list(SIZES))
            shape = [generator.randrange(5) for _ in range(generator.randrange(5))]
            data = bytes(generator.randrange(256) for _ in range(count(shape) * SIZES[dtype]))
            tensors.append((name, dtype, shape, data))
        entries = []
        content = b""
        for name, dtype, shape, data in tensors:
            info = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
            if generator.random() < 0.2:
                info["note"] = {"ignored": [None, 1.5, {"deep": []}]}
            entries.append((name, dict(generator.sample(list(info.items()), len(info)))))
            content += data
            lines.append(line(file, name, dtype, shape, data))
        if generator.random() < 0.5:
            entries.append(("__metadata__", {"format": "pt", "é": "\n"}))
        generator.shuffle(entries)  # the order of the header says nothing
        header = json.dumps(dict(entries), ensure_ascii=generator.random() < 0.5,
                            indent=generator.choice([None, 1])).encode()
        header += b" " * generator.randrange(9)
        with open(os.path.join(folder, file), "wb") as out:
            out.write(struct.pack("<Q", len(header)) + header + content)
    with open(os.path.join(folder, "manifest.txt"), "w", encoding="utf-8") as out:
        out.write("\n".join(lines) + "\n")


def read(path, out_path):
    lines = []
    with open(path, "rb") as file:
        content = file.read()
    size, = struct.unpack("<Q", content[:8])
    assert content[8:9] == b"{"
    pairs = json.loads(content[8:8 + size].decode("utf-8"), object_pairs_hook=list)
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names))
    data = content[8 + size:]
    end = 0
    for name, value in pairs:
        if name == "__metadata__":
            continue
        info = dict(value)
        assert set(info) == {"dtype", "shape", "data_offsets"}
        begin, next_end = info["data_offsets"]
        assert begin == end and next_end - begin == count(info["shape"]) * SIZES[info["dtype"]]
        end = next_end
        lines.append(line(os.path.basename(path), name, info["dtype"], info["shape"], data[begin:end]))
    assert end == len(data)
    lines.append(str(8 + size))
    with open(out_path, "w", encoding="utf-8") as out:
        out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
