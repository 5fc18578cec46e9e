"""Loading and saving tensors of whole models, with numpy, and with PyTorch if it is there."""

import gc
import importlib.util
import io
import json
import os
import pickle
import struct
import tempfile
import threading
import unittest
import weakref

import numpy
import pinflow

try:
    import h5py
except ImportError:
    h5py = None
try:
    import torch
except ImportError:
    torch = None


def devices():
    has_gpu = torch is not None and torch.cuda.is_available() and not pinflow.no_cuda_reason()
    return ["cpu"] + (["cuda", "cuda:0", 0, torch.device("cuda", 0)] if has_gpu else [])


def write_safetensors(path, tensors, metadata=None):
    """Writes the format without pinflow and without safetensors. `tensors`: name -> (type, shape, bytes)."""
    header, offset = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


class LoadTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "model.safetensors")

    def other(self, name):
        return os.path.join(self.folder.name, name)

    def test_numpy_arrays_have_the_bytes_of_the_file(self):
        random = numpy.random.default_rng(1)
        large = random.random((700, 513))
        small = random.integers(0, 255, (3, 5), dtype=numpy.uint8)
        write_safetensors(self.path, {"large": ("F64", large.shape, large.tobytes()),
                                      "small": ("U8", small.shape, small.tobytes()),
                                      "odd": ("F32", (), numpy.float32(7).tobytes()),
                                      "empty": ("I64", (0, 4), b"")}, {"format": "np"})
        report = {}
        loaded = pinflow.load_file(self.path, framework="np", report=report)
        self.assertIs(type(loaded), dict)  # what pickle and PyTorch's transforms know
        self.assertEqual(set(loaded), {"empty", "large", "small", "odd"})
        numpy.testing.assert_array_equal(loaded["large"], large)
        numpy.testing.assert_array_equal(loaded["small"], small)
        self.assertEqual(loaded["odd"], 7)
        self.assertEqual(loaded["empty"].shape, (0, 4))
        self.assertEqual(report["bytes"], large.nbytes + small.nbytes + 4)
        self.assertGreater(report["mapped_bytes"], 0)
        loaded["large"][0, 0] = 5  # a private page
        numpy.testing.assert_array_equal(pinflow.load_file(self.path, framework="np")["large"], large)

    def test_several_files_names_types_and_progress(self):
        values = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
        numpy.save(self.other("bias.npy"), values)
        numpy.savez_compressed(self.other("rest.npz"), a=values, b=values.astype(">i4"))
        seen = []
        loaded = pinflow.load_files([self.other("bias.npy"), self.other("rest.npz")], framework="np",
                                    dtype=numpy.float64, progress=lambda done, total: seen.append((done, total)))
        self.assertEqual(sorted(loaded), ["a", "b", "bias"])
        self.assertEqual(loaded["a"].dtype, numpy.float64)
        self.assertEqual(loaded["b"].dtype, numpy.int32)  # `dtype` casts floats only
        numpy.testing.assert_array_equal(loaded["b"], values)
        numpy.testing.assert_array_equal(loaded["bias"], values)
        self.assertEqual(seen[-1][0], seen[-1][1])
        self.assertEqual(pinflow.load_files([self.other("rest.npz")], framework="np", names=[]), {})
        chosen = pinflow.load_files([self.other("rest.npz")], framework="np", names=["[ab]"])
        self.assertEqual(sorted(chosen), ["a", "b"])
        for names in (iter(["a"]), {"a": 1}, ("a",)):
            self.assertEqual(list(pinflow.load_file(self.other("rest.npz"), framework="np", names=names)), ["a"])

        def stop(done, total):
            raise KeyError("enough")

        with self.assertRaises(KeyError):
            pinflow.load_file(self.other("rest.npz"), framework="np", progress=stop)

    def test_wrong_arguments_are_refused(self):
        write_safetensors(self.path, {"a": ("F32", (2,), bytes(8)), "bad": ("F4", (4,), bytes(2))})
        with self.assertRaisesRegex(pinflow.Unsupported, "bad"):
            pinflow.load_file(self.path, framework="np")
        self.assertEqual(list(pinflow.load_file(self.path, framework="np", names=["a"])), ["a"])
        with pinflow.safe_open(self.path, framework="np") as model:
            self.assertEqual((model.keys(), model.offset_keys()), (["a", "bad"], ["a", "bad"]))
            for call in (lambda: model.get_tensor("bad"), lambda: model.get_slice("bad"), model.get_tensors):
                with self.assertRaisesRegex(pinflow.Unsupported, "bad"):
                    call()
        write_safetensors(self.path, {"a": ("F32", (2,), bytes(8))})
        for wrong in ({"names": "a"}, {"names": ["none"]}, {"framework": "tf"}, {"route": "fast"},
                      {"framework": "np", "device": "cuda:0"}, {"device": "meta"}, {"device": "auto"}, {"names": 1},
                      {"names": [b"a"]}, {"names": ["\ud800"]}, {"framework": []}, {"route": None}):
            with self.subTest(wrong), self.assertRaises(pinflow.InvalidArgument):
                pinflow.load_file(self.path, **{"framework": "np", **wrong})
        with self.assertRaises(pinflow.InvalidArgument):
            pinflow.load_files(self.path)
        with self.assertRaises(pinflow.InvalidArgument):
            pinflow.load_files([self.path, self.path], framework="np")
        with self.assertRaises(pinflow.NotFound):
            pinflow.load_file(self.other("none"), framework="np")
        for wrong in ({"threads": -1}, {"threads": "2"}, {"dtype": int}, {"dtype": "<i4"}, {"dtype": ">f4"}, {"dtype": "b16"}):
            with self.subTest(wrong), self.assertRaises(pinflow.InvalidArgument):
                pinflow.load_file(self.path, framework="np", **wrong)
        for call in (lambda: pinflow.load_file(self.path + "\0x"), lambda: pinflow.save_file({}, "a\0b"),
                     lambda: pinflow.save_file([1], self.path), lambda: pinflow.save_file({1: numpy.ones(2)}, self.path),
                     lambda: pinflow.safe_open(None), lambda: pinflow.safe_open({self.path: 0}),
                     lambda: pinflow.safe_open([1]), lambda: pinflow.load_files([None])):
            with self.assertRaises(pinflow.InvalidArgument):
                call()
        with open(self.path, "rb") as file, self.assertRaises(pinflow.InvalidArgument):
            pinflow.safe_open(file)
        with self.assertRaisesRegex(pinflow.FormatError, "a folder"):
            pinflow.load_file(self.folder.name)
        numpy.savez_compressed(self.other("damaged.npz"), a=numpy.arange(5000))
        with open(self.other("damaged.npz"), "r+b") as file:
            file.seek(200)
            file.write(b"\xff" * 60)
        with self.assertRaises(pinflow.FormatError):
            pinflow.load_file(self.other("damaged.npz"), framework="np")
        with open(self.path, "r+b") as file:
            file.truncate(os.path.getsize(self.path) - 1)
        with self.assertRaisesRegex(pinflow.FormatError, "model.safetensors"):
            pinflow.load_file(self.path, framework="np")

    def test_parts_of_tensors(self):
        values = numpy.arange(6 * 7 * 8, dtype=numpy.int16).reshape(6, 7, 8)
        write_safetensors(self.path, {"v": ("I16", values.shape, values.tobytes()),
                                      "w": ("F32", (3,), bytes(12))}, {"a": "b"})
        with pinflow.safe_open(self.path, framework="np") as model:
            self.assertEqual(model.keys(), ["v", "w"])
            self.assertEqual(model.metadata(), {"a": "b"})
            part = model.get_slice("v")
            self.assertEqual(part.get_shape(), [6, 7, 8])
            self.assertEqual(part.get_dtype(), "I16")
            for key in (numpy.s_[2:4], numpy.s_[:, 1:6], numpy.s_[:, :, 3:], numpy.s_[1], numpy.s_[-1, 2:5], numpy.s_[:],
                        numpy.s_[..., 2], numpy.s_[::2, 1:3], numpy.s_[4:2], numpy.s_[:, 3, ::-1], numpy.s_[1:3, 2:4, 5],
                        numpy.s_[numpy.int64(-2)], numpy.s_[:, numpy.int8(3)], numpy.s_[1:, 2:4], numpy.s_[1:, 3],
                        numpy.s_[::2, 1:, 4], numpy.s_[2:4, 5:5], numpy.s_[-3:, ..., -1]):
                with self.subTest(key):
                    numpy.testing.assert_array_equal(part[key], values[key])
            for key in (numpy.s_[None, 2:4], numpy.s_[numpy.array([0, 2])], numpy.s_[values[:, 0, 0] > 60, 1:3]):
                numpy.testing.assert_array_equal(part[key], values[key])
            for key in (6, (0, 0, 0, 0), (slice(None), 9), (..., ...)):
                with self.subTest(key), self.assertRaises(IndexError):
                    part[key]
            numpy.testing.assert_array_equal(model.get_tensor("v"), values)
            for name in ("none", None, b"v", "\ud800"):
                with self.assertRaises(pinflow.InvalidArgument):
                    model.get_tensor(name)
            for parts in ([], {"v": (0, 0.5, 1)}, {"v": (0, 1)}, {"v": (3, 0, 1)}, {"v": (0, 0, 7)}):
                with self.subTest(parts), self.assertRaises(pinflow.InvalidArgument):
                    model.get_slices(parts)
            whole = model.get_tensors()
            self.assertEqual(sorted(whole), ["v", "w"])
            numpy.testing.assert_array_equal(whole["v"], values)
        with self.assertRaisesRegex(pinflow.InvalidArgument, "closed"):
            part[0]
        with pinflow.safe_open(self.path, framework="dlpack") as model:
            numpy.testing.assert_array_equal(numpy.from_dlpack(model.get_slice("v")[:, 1:6]), values[:, 1:6])
            numpy.testing.assert_array_equal(numpy.from_dlpack(model.get_slice("v")[0:6:1, -7:]), values)
            self.assertIsNotNone(model.metadata())
            with self.assertRaises(pinflow.Unsupported):
                model.get_slice("v")[0]

    def test_saving_and_loading_again(self):
        tensors = {"a": numpy.arange(5.0), "t": numpy.arange(6, dtype=numpy.int32).reshape(2, 3).T,
                   "b": numpy.array(True), "big": numpy.arange(3, dtype=">f4"), "none": numpy.empty((0, 2))}
        pinflow.save_file(tensors, self.path, {"format": "pt", "n": "1"})
        loaded = pinflow.load_file(self.path, framework="np")
        for name, expected in tensors.items():
            numpy.testing.assert_array_equal(loaded[name], expected)
        with pinflow.safe_open(self.path, framework="np") as model:
            self.assertEqual(model.metadata(), {"format": "pt", "n": "1"})
        for wrong in ({"a": "text"}, {"a": numpy.array([object()])}, {"a": numpy.array(["x"])}, {"a": 5}, {"a": [1, 2]},
                      {"a": numpy.ones(2, complex)}, {"\ud800": numpy.ones(2)}):
            with self.subTest(wrong), self.assertRaises(pinflow.InvalidArgument):
                pinflow.save_file(wrong, self.path)
        for wrong in ({"step": 1}, {1: "a"}, {"a": None}, {"a": "\ud800"}, [("a", "b")]):
            with self.subTest(wrong), self.assertRaises(pinflow.InvalidArgument):
                pinflow.save_file(tensors, self.path, wrong)

        def stop(done, total):
            raise KeyError("enough")

        with self.assertRaises(KeyError):
            pinflow.save_file({"other": numpy.ones(3)}, self.path, progress=stop)
        self.assertEqual(os.listdir(self.folder.name), ["model.safetensors"])
        self.assertEqual(sorted(pinflow.load_file(self.path, framework="np")), sorted(tensors))

    def test_a_safetensors_file_may_be_replaced_while_it_is_open(self):
        pinflow.save_file({"a": numpy.zeros(4), "b": numpy.ones(4)}, self.path)
        with pinflow.safe_open(self.path, framework="np") as model:
            pinflow.save_file({"a": model.get_tensor("a")}, self.path)
            numpy.testing.assert_array_equal(model.get_tensor("b"), numpy.ones(4))
        with pinflow.safe_open(self.path, framework="np") as model:
            with open(self.path, "ab") as file:
                file.write(b"more")
            with self.assertRaisesRegex(pinflow.DataChanged, "has changed since it was opened"):
                model.get_tensor("a")

    def test_saving_a_tensor_of_a_truncated_file_is_an_error(self):
        long = {"a": numpy.arange(1 << 20)}  # written directly
        short = {name: numpy.arange(75_000) for name in "abc"}  # through a buffer
        for tensors in (long, short):
            pinflow.save_file(tensors, self.path)
            report = {}
            loaded = pinflow.load_file(self.path, framework="np", report=report)
            self.assertGreater(report["mapped_bytes"], 0)
            os.truncate(self.path, 5000)
            for path in (self.other("copy"), self.path):
                with self.assertRaisesRegex(pinflow.DataChanged, "'a'.*truncated"):
                    pinflow.save_file(loaded, path)
            self.assertFalse(os.path.exists(self.other("copy")))
            self.assertEqual(os.path.getsize(self.path), 5000)

    def test_saving_a_part_of_a_tensor_of_a_truncated_file_is_an_error(self):
        pinflow.save_file({"a": numpy.arange(1 << 20).reshape(1024, 1024)}, self.path)
        frameworks = ["np"] + (["pt"] if torch is not None else [])
        loaded = [pinflow.load_file(self.path, framework=each)["a"] for each in frameworks]
        parts = [part for each in loaded for part in (each.T, each[:, 3:])] + [loaded[0][::-1], loaded[0].view(">i8")]
        if torch is not None:
            parts.append(loaded[1].view(torch.float64).view(torch.complex128).conj())
        os.truncate(self.path, 5000)
        for part in parts:
            with self.assertRaisesRegex(pinflow.DataChanged, "'a'.*truncated"):
                pinflow.save_file({"a": part}, self.other("copy"))

    def test_saving_an_array_of_a_truncated_file_is_an_error(self):
        pinflow.save_file({"a": numpy.arange(1 << 20).reshape(1024, 1024)}, self.path)
        loaded = pinflow.load_file(self.path, framework="np")["a"]
        os.truncate(self.path, 5000)
        for part in (loaded, loaded.T, loaded[:, 3:], loaded[::-1]):
            with self.assertRaisesRegex(pinflow.DataChanged, "truncated"):
                pinflow.save(self.other("copy.npy"), part)
        self.assertFalse(os.path.exists(self.other("copy.npy")))

    def test_a_destination_in_a_truncated_file_is_an_error(self):
        values = numpy.arange(300_000, dtype=numpy.float32)
        pinflow.save_file({"a": values, "b": values}, self.path)
        numpy.savez_compressed(self.other("c.npz"), a=values, b=values)
        first = numpy.zeros_like(values)
        for source in (self.path, self.other("c.npz")):
            for kind in (numpy.float32, numpy.float16):
                with self.subTest((source, kind)):
                    numpy.zeros(values.size, kind).tofile(self.other("memory"))
                    mapped = numpy.memmap(self.other("memory"), kind, "r+")
                    os.truncate(self.other("memory"), 5000)
                    with self.assertRaisesRegex(pinflow.DataChanged, "the destination 'b' cannot be accessed"):
                        pinflow.load_into(source, {"a": first, "b": mapped})
        self.assertEqual(first.sum(), 0)

    def test_exhausted_memory_names_the_tensor(self):
        with open(self.other("vast.npy"), "wb") as file:  # more than memory; big-endian, so it is not mapped
            shape = (500_000_000_000,)
            numpy.lib.format.write_array_header_1_0(file, {"descr": ">f4", "fortran_order": False, "shape": shape})
            file.truncate(file.tell() + 4 * shape[0])
        with self.assertRaisesRegex(pinflow.SystemFailure, "cannot load 'vast' of .*vast.npy': cannot allocate"):
            pinflow.load_file(self.other("vast.npy"))

    @unittest.skipIf(torch is None or importlib.util.find_spec("ml_dtypes") is None, "needs PyTorch and ml_dtypes")
    def test_a_table_is_made_of_an_array_of_ml_dtypes(self):
        import ml_dtypes

        for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
            values = numpy.arange(40, dtype="f4").reshape(8, 5).astype(dtype)
            table = pinflow.RowTable(values, device="host")
            self.assertEqual(table.dtype, values.dtype)
            self.assertEqual(table.gather([3, 1]).float().tolist(), values[[3, 1]].astype("f4").tolist())
            table.scatter([0, 2], numpy.array([[1] * 5, [2] * 5], dtype))
            self.assertEqual(values[[0, 2]].astype("f4").tolist(), [[1] * 5, [2] * 5])
            with self.assertRaises(pinflow.InvalidArgument):
                table.scatter([0], numpy.zeros((1, 5), "f4"))
        swapped = numpy.zeros((2, 2), numpy.dtype(ml_dtypes.bfloat16).newbyteorder(">"))
        table = pinflow.RowTable(numpy.zeros((2, 2), ml_dtypes.bfloat16), device="host")
        for call in (lambda: pinflow.RowTable(swapped, device="host"), lambda: table.scatter([0, 1], swapped),
                     lambda: pinflow.Loader(swapped, batch=1, device="host")):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "another byte order"):
                call()

    @unittest.skipIf(h5py is None, "needs h5py")
    def test_one_name_selects_what_a_list_of_names_selects(self):
        path = self.other("links.h5")
        with h5py.File(path, "w") as file:
            file["g/in"], file["top"] = numpy.arange(5), numpy.arange(7)
            file["soft"], file["hard"], file["alias"] = h5py.SoftLink("/g"), file["g"], file["g/in"]
            file["again"] = h5py.SoftLink("/top")
        for name in ("g/in", "top", "soft/in", "hard/in", "alias", "again", "g", "none", "/top", "g/in/"):
            with self.subTest(name):
                outcomes = []
                for names in ([name], [name, name], [name, "top"]):
                    try:
                        outcomes.append(pinflow.load_file(path, names=names, framework="np")[name].tolist())
                    except pinflow.InvalidArgument:
                        outcomes.append(None)
                self.assertEqual(outcomes, outcomes[:1] * 3)

    def test_boxes_of_tensors_are_read_from_every_format(self):
        values = numpy.random.default_rng(3).integers(0, 1000, (40, 50, 60)).astype("f4")
        pinflow.save_file({"a": values}, self.path)
        numpy.savez(self.other("b.npz"), b=values)
        numpy.savez_compressed(self.other("c.npz"), c=values)
        numpy.save(self.other("d.npy"), numpy.asfortranarray(values))
        paths = [self.path, self.other("b.npz"), self.other("c.npz"), self.other("d.npy")]
        if h5py is not None:
            with h5py.File(self.other("e.h5"), "w") as file:
                file.create_dataset("e", data=values, chunks=(7, 16, 32), compression="gzip")
                file.create_dataset("f", data=values, chunks=(7, 16, 32), scaleoffset=3)  # which only libhdf5 reads
            paths.append(self.other("e.h5"))
        keys = (numpy.s_[3, 10:20, 5:9], numpy.s_[3:9, 10:20, 5:9], numpy.s_[:, 7, 8], numpy.s_[..., 4:40:3],
                numpy.s_[30:2:-4, 3], numpy.s_[5:5, 3:9], numpy.s_[-3:, ..., -1], numpy.s_[1, 2, 3], numpy.s_[:, 2:-2, 30:])
        with pinflow.safe_open(paths, framework="np") as model:
            for name in model.keys():
                for key in keys:
                    with self.subTest((name, key)):
                        part = model.get_slice(name)[key]
                        numpy.testing.assert_array_equal(part, values[key])
                        self.assertEqual(numpy.shape(part), values[key].shape)
                both = model.get_slices({name: [(0, 3, 30), (-1, 5, 50)]})[name]
                numpy.testing.assert_array_equal(both, values[3:30, :, 5:50])
            numpy.testing.assert_array_equal(model.get_slice("a")[[3, 1], 2:5], values[[3, 1], 2:5])
            with self.assertRaisesRegex(pinflow.InvalidArgument, "twice along axis 1"):
                model.get_slices({"a": [(1, 0, 3), (1, 0, 3)]})
            with self.assertRaises(pinflow.InvalidArgument):
                model.get_slices({"a": [1, 0, 3]})

    @unittest.skipIf(h5py is None, "needs h5py")
    def test_a_field_of_a_structured_tensor_can_be_selected(self):
        values = numpy.array([(1, 2.5), (3, 4.5)], [("x", "<i4"), ("y", "<f8")])
        with h5py.File(self.other("s.h5"), "w") as file:
            file["s"] = values
        with pinflow.safe_open(self.other("s.h5"), framework="np") as model:
            numpy.testing.assert_array_equal(model.get_slice("s")["x"], values["x"])
            numpy.testing.assert_array_equal(model.get_slice("s")[["y"]], values[["y"]])

    def test_a_slice_of_a_truncated_file_is_an_error(self):
        pinflow.save_file({"a": numpy.arange(1 << 20).reshape(1024, 1024)}, self.path)
        with pinflow.safe_open(self.path, framework="np") as model:
            part = model.get_slice("a")
            numpy.testing.assert_array_equal(part[:, 5:9], numpy.arange(1 << 20).reshape(1024, 1024)[:, 5:9])
            os.truncate(self.path, 100_000)
            with self.assertRaises(pinflow.DataChanged):
                part[:, 5:9]

    def test_columns_of_a_mapped_tensor_are_a_private_view(self):
        values = numpy.arange(1 << 21).reshape(64, 128, 256)
        pinflow.save_file({"a": values, "small": values[0, :64, :64]}, self.path)
        numpy.savez_compressed(self.other("b.npz"), b=values)
        with pinflow.safe_open([self.path, self.other("b.npz")], framework="np") as model:
            for name, is_view, whole in (("a", True, values), ("small", False, values[0, :64, :64]), ("b", False, values)):
                for key in (numpy.s_[:, 5:9], numpy.s_[..., 3], numpy.s_[1:3, 7], numpy.s_[2, ..., -2:], numpy.s_[:, -1]):
                    if len(key) > whole.ndim:
                        continue
                    with self.subTest((name, key)):
                        part = model.get_slice(name)[key]
                        numpy.testing.assert_array_equal(part, whole[key])
                        part[...] = -1
                        numpy.testing.assert_array_equal(model.get_slice(name)[key], whole[key])
                columns = model.get_slice(name)[:, 5:45]
                self.assertEqual(columns.strides == whole[:, 5:45].strides, is_view)
                self.assertTrue(model.get_slice(name)[:, 5:7].flags.c_contiguous)
            self.assertTrue(model.get_slices({"a": (1, 5, 9)})["a"].flags.c_contiguous)
        columns[...] = 3  # outlives the file
        numpy.testing.assert_array_equal(pinflow.load_file(self.path, framework="np")["a"], values)

    def test_many_views_of_columns_do_not_exhaust_mappings(self):
        values = numpy.arange(1 << 20).reshape(512, 2048)  # 8 MiB
        pinflow.save_file({"a": values}, self.path)
        with pinflow.safe_open(self.path, framework="np") as model:
            part = model.get_slice("a")
            kept = [part[:, 3:1400] for _ in range(8200)]
            self.assertFalse(kept[0].flags.c_contiguous)
            self.assertTrue(kept[-1].flags.c_contiguous)
            for each in kept[::1000] + kept[-2:]:
                numpy.testing.assert_array_equal(each, values[:, 3:1400])

    def test_a_file_that_changes_while_it_is_open_is_not_called_damaged(self):
        values = numpy.arange(200_000.0).reshape(400, 500)
        numpy.savez_compressed(self.other("a.npz"), a=values)
        numpy.save(self.other("b.npy"), numpy.asfortranarray(values))
        with pinflow.safe_open([self.other("a.npz"), self.other("b.npy")], framework="np") as model:
            for name, path in (("a", self.other("a.npz")), ("b", self.other("b.npy"))):
                numpy.testing.assert_array_equal(model.get_tensor(name), values)
                os.truncate(path, os.path.getsize(path) - 1000)
                with self.subTest(name), self.assertRaises(pinflow.DataChanged):
                    model.get_tensor(name)

    def test_slices_along_the_last_axis_and_the_number_of_tensors(self):
        array = numpy.arange(60).reshape(3, 4, 5)
        pinflow.save_file({"a": array, "b": array[0]}, self.path)
        with pinflow.safe_open(self.path, framework="np") as model:
            self.assertEqual(len(model), 2)
            parts = model.get_slices({"a": (-1, 1, 3), "b": (-2, 0, 4)})
            numpy.testing.assert_array_equal(parts["a"], array[..., 1:3])
            numpy.testing.assert_array_equal(parts["b"], array[0])
            with self.assertRaises(pinflow.InvalidArgument):
                model.get_slices({"a": (-4, 0, 1)})
        with self.assertRaisesRegex(pinflow.InvalidArgument, "is given twice"):
            pinflow.load_files([self.path, self.path])

    def test_parts_of_tensors_behave_like_parts_of_numpy_arrays(self):
        pinflow.save_file({"a": numpy.float64(3), "b": numpy.arange(6).reshape(2, 3)}, self.path)
        with pinflow.safe_open(self.path, "np") as model:
            scalar, matrix = model.get_slice("a"), model.get_slice("b")
            self.assertEqual((type(scalar[...]), scalar[...].shape), (numpy.ndarray, ()))
            self.assertEqual((type(matrix[..., 1, 2]), matrix[..., 1, 2]), (numpy.ndarray, 5))
            self.assertEqual((type(scalar[()]), scalar[()]), (numpy.float64, 3))
            self.assertIsInstance(matrix[1, 2], numpy.integer)
            numpy.testing.assert_array_equal(numpy.asarray(matrix), numpy.arange(6).reshape(2, 3))
            self.assertEqual(numpy.asarray(matrix, dtype="f4").dtype, numpy.float32)
            self.assertEqual(repr(matrix), "<pinflow.TensorSlice 'b' I64 (2, 3)>")
            self.assertIn("model.safetensors", repr(model))

    def test_an_open_file_can_be_pickled(self):
        pinflow.save_file({"a": numpy.arange(6).reshape(2, 3)}, self.path)
        with pinflow.safe_open(self.path, "np") as model:
            again, part = pickle.loads(pickle.dumps((model, model.get_slice("a"))))
            self.assertEqual(again.keys(), ["a"])
            numpy.testing.assert_array_equal(part[1], [3, 4, 5])
        with self.assertRaises(pinflow.InvalidArgument):
            pickle.dumps(model)

    def test_dlpack_tensors_on_the_host_become_numpy_arrays(self):
        pinflow.save_file({"a": numpy.arange(6), "empty": numpy.empty((0, 2))}, self.path)
        loaded = pinflow.load_file(self.path, framework="dlpack")
        numpy.testing.assert_array_equal(numpy.asarray(loaded["a"]), numpy.arange(6))
        self.assertEqual(numpy.asarray(loaded["a"], dtype="f4").dtype, numpy.float32)
        self.assertEqual(numpy.asarray(loaded["empty"]).shape, (0, 2))

    def test_types_that_numpy_lacks_are_saved_from_arrays(self):
        write_safetensors(self.path, {"a": ("BF16", (2,), b"\x80\x3f\x00\x40"), "b": ("F8_E4M3", (1,), b"8")})
        pinflow.save_file({name: pinflow.open(self.path, name) for name in "ab"}, self.other("copy"))
        with pinflow.safe_open(self.other("copy"), "np") as model:
            self.assertEqual([model.get_slice(name).get_dtype() for name in "ab"], ["BF16", "F8_E4M3"])
            self.assertEqual([model.get_tensor(name).tobytes() for name in "ab"], [b"\x80\x3f\x00\x40", b"8"])

    def test_names_are_not_escaped(self):
        write_safetensors(self.path, {"a\tb": ("U8", (1,), b"1")})
        self.assertEqual([each["name"] for each in pinflow.list(self.path)], ["a\tb"])
        self.assertEqual(pinflow.open(self.path, "a\tb").shape, (1,))
        self.assertEqual(list(pinflow.load_file(self.path, framework="np")), ["a\tb"])

    def test_messages_are_one_line(self):
        with self.assertRaises(pinflow.NotFound) as raised:
            pinflow.load_file(self.other("a\nb\x1b[31m"))
        self.assertIn("a\\nb\\x1b[31m", str(raised.exception))
        self.assertNotIn("\n", str(raised.exception))

    def test_an_array_that_cannot_be_loaded_is_refused_with_advice(self):
        numpy.savez(self.other("a.npz"), good=numpy.arange(3), bad=numpy.array([None], dtype=object))
        with self.assertRaisesRegex(pinflow.Unsupported, "'bad.*to load the other tensors, give their names"):
            pinflow.load_file(self.other("a.npz"), framework="np")
        loaded = pinflow.load_file(self.other("a.npz"), framework="np", names=["good"])
        numpy.testing.assert_array_equal(loaded["good"], numpy.arange(3))

    def test_tensors_for_other_libraries(self):
        values = numpy.arange(4, dtype=numpy.float32)
        write_safetensors(self.path, {"v": ("F32", (4,), values.tobytes())})
        tensor = pinflow.load_file(self.path, framework="dlpack")["v"]
        self.assertEqual((tensor.name, tensor.shape, tensor.nbytes, tensor.device), ("v", (4,), 16, "host"))
        self.assertEqual(tensor.dtype, numpy.float32)
        numpy.testing.assert_array_equal(numpy.from_dlpack(tensor), values)
        made = numpy.from_dlpack(tensor)
        del tensor
        gc.collect()
        numpy.testing.assert_array_equal(made, values)


@unittest.skipUnless(torch, "needs PyTorch")
class TorchLoadTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "model.safetensors")
        torch.manual_seed(3)
        self.tensors = {
            "large": torch.randn(3000, 1001), "half": torch.randn(1500, 700).to(torch.bfloat16),
            "f16": torch.randn(5).to(torch.float16), "f64": torch.randn(3, 2, dtype=torch.float64),
            "ids": torch.arange(7), "flags": torch.tensor([True, False]), "scalar": torch.tensor(3.5),
            "none": torch.empty(0, 3), "i8": torch.arange(-3, 3, dtype=torch.int8), "c": torch.randn(3, dtype=torch.complex64),
            "f8": torch.randn(9).to(torch.float8_e4m3fn), "u16": torch.arange(5).to(torch.uint16),
        }
        for name in ("float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"):
            if hasattr(torch, name):
                self.tensors[name] = torch.arange(256).to(torch.uint8).view(getattr(torch, name))
        pinflow.save_file(self.tensors, self.path, {"format": "pt"})

    def assert_same(self, tensor, expected):
        self.assertEqual((tensor.dtype, tensor.shape), (expected.dtype, expected.shape))
        self.assertTrue(torch.equal(tensor.cpu().flatten().view(torch.uint8), expected.flatten().view(torch.uint8)))

    def test_every_type_on_every_device(self):
        for device in devices():
            for route in ("auto", "staged", "both"):
                with self.subTest(device=device, route=route):
                    loaded = pinflow.load_file(self.path, device=device, route=route)
                    self.assertEqual(set(loaded), set(self.tensors))
                    for name, expected in self.tensors.items():
                        self.assert_same(loaded[name], expected)
                        self.assertEqual(loaded[name].device.type, "cpu" if device == "cpu" else "cuda")
                        loaded[name].zero_()  # writable

    def test_loaded_tensors_are_saved_by_torch_with_their_own_bytes_only(self):
        for device in devices():
            loaded = pinflow.load_file(self.path, device=device)
            stored = io.BytesIO()
            torch.save({"f16": loaded["f16"], "f64": loaded["f64"]}, stored)
            self.assertLess(len(stored.getvalue()), 10_000)
            loaded["f64"].requires_grad_()
            total = loaded["f64"].square().sum()
            loaded["f16"].add_(1)  # a neighbour in the block
            total.backward()

    def test_the_reference_implementation_agrees(self):
        try:
            from safetensors.torch import load_file, save_file
        except ImportError:
            self.skipTest("needs safetensors")
        for name, tensor in load_file(self.path).items():
            self.assert_same(tensor, self.tensors[name])
        save_file(self.tensors, self.path)
        for name, tensor in pinflow.load_file(self.path).items():
            self.assert_same(tensor, self.tensors[name])

    def test_a_model_takes_the_tensors(self):
        for device in devices():
            model = torch.nn.Linear(7, 3).to(device)
            pinflow.save_file(model.state_dict(), self.path)
            other = torch.nn.Linear(7, 3).to(device)
            other.load_state_dict(pinflow.load_file(self.path, device=device))
            self.assertTrue(torch.equal(model.weight, other.weight))

    def test_types_slices_and_threads(self):
        for device in devices():
            loaded = pinflow.load_file(self.path, device=device, names=["large", "ids"], dtype=torch.bfloat16, threads=2)
            self.assert_same(loaded["large"], self.tensors["large"].to(torch.bfloat16))
            self.assert_same(loaded["ids"], self.tensors["ids"])
            with pinflow.safe_open(self.path, framework="pt", device=device) as model:
                part = model.get_slice("large")
                self.assert_same(part[:, 10:500], self.tensors["large"][:, 10:500].contiguous())
                self.assert_same(part[5], self.tensors["large"][5])
                self.assert_same(model.get_tensor("scalar"), self.tensors["scalar"])

    def test_tensors_are_dropped_on_another_thread_after_everything_else(self):
        for device in devices():
            loaded = pinflow.load_file(self.path, device=device)
            kept = [loaded["large"], loaded["f64"]]
            del loaded
            os.replace(self.path, self.path + ".moved")
            gc.collect()
            self.assert_same(kept[0], self.tensors["large"])
            thread = threading.Thread(target=kept.clear)
            thread.start()
            thread.join()
            os.replace(self.path + ".moved", self.path)

    def test_complex_numbers_that_are_misaligned_or_conjugated(self):
        numbers = torch.randn(300_000, dtype=torch.complex64)
        for begin in (0, 4):
            write_safetensors(self.path, {"first": ("U8", (begin,), bytes(begin)),
                                          "c": ("C64", numbers.shape, numbers.numpy().tobytes())})
            self.assertTrue(torch.equal(pinflow.load_file(self.path)["c"], numbers))
        pinflow.save_file({"c": numbers.conj()}, self.path)
        self.assertTrue(torch.equal(pinflow.load_file(self.path)["c"], numbers.conj().resolve_conj()))

    def test_tensors_whose_storage_has_been_shrunk_are_refused(self):
        shrunk, part = torch.zeros(3000, 1001), torch.zeros(4000, 1001)[1000:]
        shrunk.untyped_storage().resize_(8)
        part.untyped_storage().resize_(0)
        for tensor in (shrunk, part):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "the tensor 'large' ends at byte .* resized"):
                pinflow.save_file({"large": tensor}, self.path)
            with self.assertRaisesRegex(pinflow.InvalidArgument, "the destination 'large' ends at byte .* resized"):
                pinflow.load_into(self.path, {"large": tensor})
        self.assert_same(pinflow.load_file(self.path)["large"], self.tensors["large"])

    def test_tensors_without_memory_of_their_own_are_refused(self):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        for tensor in (nested, torch.nn.UninitializedParameter()):
            with self.assertRaisesRegex(pinflow.InvalidArgument, "'w'"):
                pinflow.save_file({"w": tensor}, self.path)

    def test_views_that_are_not_contiguous_are_saved_as_they_look(self):
        for device in devices():
            tensor = torch.arange(12.0, device=device).reshape(3, 4).T
            pinflow.save_file({"t": tensor, "s": tensor[1:3]}, self.path)
            loaded = pinflow.load_file(self.path)
            self.assertTrue(torch.equal(loaded["t"], tensor.cpu()))
            self.assertTrue(torch.equal(loaded["s"], tensor[1:3].cpu()))

    def test_dropped_tensors_are_free_at_once_on_any_thread(self):
        if len(devices()) == 1:
            self.skipTest("needs a GPU")
        measured = []

        def load_and_drop():
            before = torch.cuda.memory_allocated()
            loaded = pinflow.load_file(self.path, device="cuda")
            held = torch.cuda.memory_allocated()
            loaded.clear()
            measured.append((before, held, torch.cuda.memory_allocated()))

        load_and_drop()
        thread = threading.Thread(target=load_and_drop)
        thread.start()
        thread.join()  # the main thread runs no Python meanwhile
        for before, held, after in measured:
            self.assertGreater(held, before)
            self.assertEqual(after, before)

    def test_large_tensors_are_pytorchs_own(self):
        if len(devices()) == 1:
            self.skipTest("needs a GPU")
        tensors = {"w": torch.arange(3_000_000, dtype=torch.bfloat16).reshape(3000, 1000), "small": torch.ones(3)}
        pinflow.save_file(tensors, self.path)
        loaded = pinflow.load_file(self.path, device="cuda")
        self.assert_same(loaded["w"], tensors["w"])
        self.assertFalse(loaded["w"]._is_view())
        self.assertEqual(loaded["w"].untyped_storage().nbytes(), 6_000_000)
        # work on another stream delays the reuse of the memory
        address, other = loaded["w"].data_ptr(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(200_000_000)
            copy = loaded["w"].clone()
        loaded["w"].record_stream(other)
        loaded.clear()
        self.assertNotEqual(torch.empty(6_000_000, dtype=torch.uint8, device="cuda").data_ptr(), address)
        other.synchronize()
        self.assert_same(copy, tensors["w"])
        kept = pinflow.load_file(self.path, device="cuda")["w"]
        kept.untyped_storage().resize_(0)  # as FSDP does
        self.assertEqual(kept.untyped_storage().nbytes(), 0)

    def test_memory_that_is_exhausted_is_an_error_of_torch(self):
        if len(devices()) == 1:
            self.skipTest("needs a GPU")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction(1e-5)
        try:
            with self.assertRaises(torch.OutOfMemoryError):
                pinflow.load_file(self.path, device="cuda")
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        self.assertEqual(torch.cuda.memory_allocated(), before)
        self.assertEqual(len(pinflow.load_file(self.path, device="cuda")), len(self.tensors))

class LoadIntoTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "model.safetensors")

    def test_arrays_are_filled_where_they_are_and_floats_are_cast(self):
        stored = {"a": numpy.random.default_rng(1).random((300, 70)), "b": numpy.arange(7), "empty": numpy.empty((0, 3)),
                  "scalar": numpy.float32(3), "other": numpy.ones(5)}
        pinflow.save_file(stored, self.path)
        memory = numpy.zeros(300 * 70 + 1, numpy.float32)
        destinations = {"a": memory[1:].reshape(300, 70), "b": numpy.zeros(7, numpy.int64), "empty": numpy.empty((0, 3)),
                        "scalar": numpy.zeros((), numpy.float32)}
        report = {}
        self.assertIsNone(pinflow.load_into(self.path, destinations, report=report))
        self.assertEqual(report["bytes"], 300 * 70 * 4 + 7 * 8 + 4)
        self.assertEqual(memory[0], 0)
        for name, array in destinations.items():
            numpy.testing.assert_array_equal(array, stored[name].astype(array.dtype))

    def test_destinations_that_do_not_fit_are_refused_and_not_written_to(self):
        pinflow.save_file({"a": numpy.ones((4, 4), numpy.float32), "b": numpy.ones(3, numpy.int64)}, self.path)
        first = numpy.zeros((4, 4), numpy.float32)
        read_only = numpy.zeros(3, numpy.int64)
        read_only.flags.writeable = False
        wrong = {
            "shape": {"b": numpy.zeros(4, numpy.int64)}, "is not contiguous": {"b": numpy.zeros(6, numpy.int64)[::2]},
            "is not writable": {"b": read_only}, "floating-point numbers are cast": {"b": numpy.zeros(3, numpy.float32)},
            "is called 'c'": {"c": numpy.zeros(3)}, "no PyTorch tensor or numpy array": {"b": [1, 2, 3]},
            "overlap": {"b": first.view(numpy.int64).reshape(-1)[:3]},
        }
        for message, destination in wrong.items():
            with self.subTest(message), self.assertRaisesRegex(pinflow.InvalidArgument, message):
                pinflow.load_into(self.path, {"a": first, **destination})
            self.assertEqual(first.sum(), 0)
        for not_named in ([first], first, None):
            with self.assertRaises(pinflow.InvalidArgument):
                pinflow.load_into(self.path, not_named)

    def test_a_lazy_mapping_of_destinations_is_kept_alive(self):
        pinflow.save_file({name: numpy.arange(1 << 16) for name in "ab"}, self.path)
        made = []

        class Lazy(dict):
            def items(self):
                for name in "ab":
                    made.append(weakref.ref(array := numpy.zeros(1 << 16, numpy.int64)))
                    yield name, array

        alive = []
        pinflow.load_into(self.path, Lazy(), progress=lambda *_: alive.append(all(each() is not None for each in made)))
        self.assertTrue(alive and all(alive))

    def test_records_are_filled_and_python_objects_are_not(self):
        records = numpy.array([(1, 2.5), (3, 4.5)], [("x", "<i4"), ("y", "<f4")])
        path = os.path.join(self.folder.name, "r.npy")
        numpy.save(path, records)
        filled = numpy.zeros(2, records.dtype)
        pinflow.load_into(path, {"r": filled})
        numpy.testing.assert_array_equal(filled, records)
        for message, wrong in (("Python objects", numpy.zeros(2, [("x", object)])),
                               ("its destination of", numpy.zeros(2, "V8")), ("little-endian", numpy.zeros(2, ">f8"))):
            with self.subTest(message), self.assertRaisesRegex(pinflow.InvalidArgument, message):
                pinflow.load_into(path, {"r": wrong})

    @unittest.skipIf(torch is None, "needs PyTorch")
    def test_autograd_notices_a_load_that_fails(self):
        pinflow.save_file({"w": numpy.zeros(1 << 16, numpy.float32)}, self.path)
        weight = torch.ones(1 << 16, requires_grad=True)
        result = (weight * weight).sum()

        def fail(*_):
            raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            pinflow.load_into(self.path, {"w": weight}, progress=fail)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            result.backward()

    @unittest.skipIf(torch is None, "needs PyTorch")
    def test_a_model_is_filled_by_its_state_dict(self):
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = torch.nn.Embedding(50, 16)
                self.norm = torch.nn.BatchNorm1d(16)
                self.head = torch.nn.Linear(16, 50, bias=False)
                self.head.weight = self.embedding.weight

        for device in devices():
            saved, model = Tied().to(device), Tied().to(device)
            tensors = saved.state_dict()
            del tensors["head.weight"]
            pinflow.save_file(tensors, self.path)
            before = model.embedding.weight._version
            pinflow.load_into([self.path], model.state_dict())
            self.assertGreater(model.embedding.weight._version, before)
            self.assertIs(model.head.weight, model.embedding.weight)
            for name, tensor in saved.state_dict().items():
                self.assertTrue(torch.equal(tensor, model.state_dict()[name]), name)
            half = Tied().to(device).to(torch.float16)
            pinflow.load_into([self.path], half.state_dict())
            self.assertTrue(torch.equal(half.embedding.weight, saved.embedding.weight.to(torch.float16)))
            with self.assertRaisesRegex(pinflow.InvalidArgument, "state_dict()"):
                pinflow.load_into(self.path, model)
            with self.assertRaisesRegex(pinflow.InvalidArgument, "none of the 7 destinations"):
                pinflow.load_into(self.path, {"model." + name: each for name, each in model.state_dict().items()})
            with self.assertRaisesRegex(pinflow.InvalidArgument, "is called 'more'"):
                pinflow.load_into(self.path, {**model.state_dict(), "more": torch.zeros(3, device=device)})

    @unittest.skipIf(torch is None, "needs PyTorch")
    def test_tensors_without_memory_are_refused(self):
        pinflow.save_file({"a": numpy.ones((4, 4), numpy.float32)}, self.path)
        wrong = {"meta": torch.empty(4, 4, device="meta"), "sparse": torch.eye(4).to_sparse(),
                 "not contiguous": torch.zeros(4, 4).t()[1:].t(), "not initialized": torch.nn.UninitializedParameter(),
                 "is nested": torch.nested.nested_tensor([torch.zeros(4)])}
        for message, destination in wrong.items():
            with self.subTest(message), self.assertRaisesRegex(pinflow.InvalidArgument, message):
                pinflow.load_into(self.path, {"a": destination})


if __name__ == "__main__":
    unittest.main()
