"""The command line tool, which is part of the package."""

from __future__ import annotations

import os
import sys
from typing import List, Optional

from ._arrays import PathLike, open, path_text
from ._errors import Error, FormatError, InvalidArgument, SystemFailure, Unsupported


def tool_path() -> str:
    """The path of the program."""
    return os.path.join(os.path.dirname(__file__), "bin", "pinflow")


def convert(source: PathLike, target: PathLike, *options: str) -> None:
    """Rewrites arrays of any format as one file that can be mapped, as `pinflow convert` does.

    Args:
        source: a file, 'FILE:NAME' or a pattern.
        target: the file, which is replaced if it exists, or 'FILE:NAME'. Its ending says the format: .npy, .npz,
            .safetensors, .h5 or .hdf5.
        options: options of the tool, such as '--dtype', 'float32'. `python -m pinflow convert --help` lists them.

    Raises:
        InvalidArgument: the command line is wrong, or this build lacks the format. NotFound, FormatError, Unsupported:
        as `open`, for the source.
        Error: something else failed, and the text is the tool's.
    """
    import subprocess  # takes longer to import than the rest of the package

    text = path_text(source)
    done = subprocess.run([tool_path(), "convert", *options, "--", text, path_text(target)],
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="backslashreplace",
                          check=False)
    if done.returncode == 0:
        return
    message = done.stderr.strip().removeprefix("pinflow: error: ") or f"pinflow convert ended with {done.returncode}"
    if done.returncode == 2:
        raise InvalidArgument(message)
    try:
        if not text.startswith("shm:"):
            open(text)
    except (SystemFailure, FormatError, Unsupported) as error:
        if ascii(text.partition(":")[0])[1:-1] in message:  # the source was the cause
            number = (error.errno,) if isinstance(error, SystemFailure) else ()
            raise type(error)(*number, message) from None
    except InvalidArgument as error:  # also if it has several arrays, which can be converted
        if str(error) in message:
            raise InvalidArgument(message) from None
    except Error:
        pass
    raise Error(message)


def main(arguments: Optional[List[str]] = None) -> None:
    """Becomes the tool."""
    os.execv(tool_path(), ["pinflow", *(sys.argv[1:] if arguments is None else arguments)])
