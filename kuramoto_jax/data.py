"""Corpora of bytes and the windows cut from them.

A corpus is three consecutive uint8 arrays (training, validation, test). Training batches are a
pure function of (seed, step), so there is no iterator state: resuming is exact, and any number of
devices sees the same batches. Evaluation windows score every byte but the first exactly once.

Axes: N bytes of a corpus or windows of a table, B windows of a batch.
"""

import bz2
import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import lzma
import os
import platform
import stat
import sys
import sysconfig
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kuramoto_jax.lock import locked

SOURCES = ("enwik8", "stdlib", "file")

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_ZIP_BYTES = 36_445_475
ENWIK8_ZIP_SHA256 = "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"
ENWIK8_BYTES = 100_000_000
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
ENWIK8_SPLIT = (0.9, 0.05, 0.05)

MAX_FILE_BYTES = 4 * 2**30  # of decompressed content
MAX_POSITION = 2**31 - 1  # positions in a corpus are int32

_CHUNK_BYTES = 2**18
_TIMEOUT_SECONDS = 30
_ZIP_MAGIC = b"PK\x03\x04"
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_READ_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)
_STDLIB_EXCLUDED = frozenset(
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
)


class DataError(ValueError):
    """A corpus cannot be had as configured.

    The message is one line that names the field, its value and what would be right.
    """


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train, validate and test on: consecutive parts of one content.

    Attributes:
        train: uint8 [N].
        validation: uint8 [N].
        test: uint8 [N].
        description: Where the bytes come from, such as "enwik8" or "file /data/x.gz".
        sha256: Hex digest of the whole content, all parts in order.
    """

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    description: str
    sha256: str


def load_corpus(
    source: str, path: str = "", split: Sequence[float] = (0.9, 0.05, 0.05), *, window: int
) -> Corpus:
    """Load a corpus and checks that every part of it holds at least one window.

    Args:
        source: "enwik8" (100 million bytes of English Wikipedia, see `enwik8_path`), "stdlib" (the
            running Python's own sources, see `read_stdlib`) or "file" (see `read_file`).
        path: The file of source "file"; for "enwik8" a copy of it, or empty for the cached or
            downloaded one; empty for "stdlib".
        split: Fractions of training, validation and test bytes, see `split_bytes`. Enwik8 has one
            agreed split, 90, 5 and 5 million bytes, and takes no other.
        window: Number of bytes a model reads at once; a part needs window + 1 bytes.

    Returns:
        The corpus; its arrays are read-only views of one buffer.

    Raises:
        DataError: A value is out of range, the content cannot be had, or a part is too short or
            too long for int32 positions.
    """
    if source not in SOURCES:
        raise DataError(f"data.source: {source!r} is unknown; use one of {', '.join(SOURCES)}")
    if window < 1:
        raise DataError(f"data.window: {window} is too small; use at least 1")
    if source == "enwik8":
        if tuple(split) != ENWIK8_SPLIT:
            raise DataError(
                f"data.split: {tuple(split)} is not the split of enwik8, {ENWIK8_SPLIT}; for"
                " another split use data.source=file with data.path"
            )
        data = _read_enwik8(enwik8_path(path))
        description = "enwik8"
    elif source == "stdlib":
        if path:
            raise DataError(
                f"data.path: {path!r} is not read by data.source=stdlib; use data.source=file, or"
                " leave data.path empty"
            )
        data = read_stdlib()
        description = f"stdlib of Python {platform.python_version()}"
    else:
        if not path:
            raise DataError("data.path: '' names no file; data.source=file needs data.path=FILE")
        data = read_file(path)
        description = f"file {_absolute(path)}"

    parts = split_bytes(data, split)
    for name, part in zip(("training", "validation", "test"), parts, strict=True):
        if len(part) < window + 1:
            raise DataError(
                f"data.window: {window} needs at least {window + 1} bytes in each split, but the"
                f" {name} split of {description} ({len(data):,} bytes) has {len(part)}; use more"
                " data, a smaller data.window or another data.split"
            )
        if len(part) + window > MAX_POSITION:
            raise DataError(
                f"data.path: the {name} split of {description} has {len(part):,} bytes, but split"
                f" and window together may have {MAX_POSITION:,}; use a smaller file"
            )
    return Corpus(*parts, description=description, sha256=hashlib.sha256(data.data).hexdigest())


def split_bytes(
    data: np.ndarray, split: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut an array into three consecutive parts, with nothing dropped or shared.

    The cuts are at floor(N * cumulative fraction), computed exactly from the decimal value of each
    fraction; the last part ends at N.

    Args:
        data: Array [N].
        split: Three positive fractions that sum to 1 (tolerance 1e-9).

    Returns:
        The three parts, views of `data`.

    Raises:
        DataError: `split` is not three positive fractions that sum to 1.
    """
    try:
        fractions = [Fraction(str(fraction)) for fraction in split]
    except ValueError:
        fractions = []
    if (
        len(fractions) != 3
        or min(fractions) <= 0
        or abs(sum(fractions, Fraction()) - 1) > Fraction(1, 1_000_000_000)
    ):
        raise DataError(
            f"data.split: {split!r} is not three positive fractions that sum to 1, such as"
            " (0.9, 0.05, 0.05)"
        )
    first = int(len(data) * fractions[0])
    second = int(len(data) * (fractions[0] + fractions[1]))
    return data[:first], data[first:second], data[second:]


def read_file(path: str | os.PathLike[str], *, limit: int = MAX_FILE_BYTES) -> np.ndarray:
    """Read the bytes of one file; the name's ending tells how.

    Files that end in .gz, .xz or .bz2 are decompressed, of a .zip its only member is read, and any
    other file is taken as it is. Nothing is written to disk.

    Args:
        path: The file; a leading "~" is the home directory.
        limit: The most bytes the (decompressed) content may have.

    Returns:
        The content, uint8 [N], N at least 1, read-only.

    Raises:
        DataError: The file is missing, no regular file, unreadable, empty, damaged or too large,
            or a .zip does not hold exactly one file.
    """
    file = _existing_file(path)
    data = _read_at_most(file, limit + 1)
    if len(data) > limit:
        raise DataError(
            f"data.path: {str(file)!r} holds more than {limit:,} bytes of content; use a smaller"
            " file"
        )
    if len(data) == 0:
        raise DataError(f"data.path: {str(file)!r} is empty; use a file with content")
    return data


def read_stdlib() -> np.ndarray:
    """Read the running Python's standard library: a corpus that every machine has.

    Returns:
        All *.py files in the order of their relative path, concatenated, uint8 [N], read-only.
        Tests and installed packages are left out. The same for each call of one installation.

    Raises:
        DataError: This Python comes without the sources of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_EXCLUDED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            f"data.source: 'stdlib' finds no Python sources in {str(root)!r}; use data.source=file"
            " with data.path=FILE"
        )
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def enwik8_path(path: str = "", *, url: str = ENWIK8_URL, cache_dir: Path | None = None) -> Path:
    """Find a file with enwik8, downloading it if there is none.

    The download goes to enwik8.zip.part in the cache directory, and becomes enwik8.zip only after
    its length and SHA-256 are verified. A transfer that stops keeps its part, and the next call
    resumes it. If several processes download at once, one does and the others wait for its result;
    where files cannot be locked (Windows, some network drives) they may spoil each other's part,
    which the verification finds and removes.

    Args:
        path: A copy of enwik8, raw or compressed (see `read_file`); it is never downloaded over.
            If empty, enwik8.zip in the cache directory.
        url: Where to download enwik8.zip from.
        cache_dir: The cache directory. By default $KURAMOTO_JAX_CACHE, else
            $XDG_CACHE_HOME/kuramoto_jax, else ~/.cache/kuramoto_jax.

    Returns:
        The file. Its content is not verified here unless it was downloaded.

    Raises:
        DataError: `path` is no file, or the download fails.
    """
    if path:
        return _existing_file(path)
    target = (cache_dir or _default_cache_dir()) / "enwik8.zip"
    if target.exists():
        return target
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(part, lambda: _report(f"waiting for another process that writes {part}")):
            try:
                if not target.exists():
                    _download_enwik8(url, part)
                    os.replace(part, target)
            finally:
                if part.exists() and part.stat().st_size == 0:
                    part.unlink()
    except OSError as error:
        raise DataError(
            f"data.source: 'enwik8' cannot be stored in {str(target.parent)!r}: {_reason(error)};"
            " set KURAMOTO_JAX_CACHE to a directory that can be written"
        ) from error
    return target


def batch_at(
    corpus_N: jax.Array, seed: ArrayLike, step: ArrayLike, *, batch_size: int, window: int
) -> jax.Array:
    """Draw the training batch of one step, a pure function of (seed, step).

    The start of each window is uniform over all that fit. The values do not depend on jit, on the
    devices or on the sharding.

    Args:
        corpus_N: Training bytes, uint8 [N].
        seed: Integer seed; may be traced.
        step: Integer step; may be traced.
        batch_size: Number of windows.
        window: Number of bytes a model reads at once.

    Returns:
        Windows with one byte more for the last target, uint8 [batch_size, window + 1].

    Raises:
        ValueError: The corpus has fewer than window + 1 bytes.
    """
    starts = corpus_N.shape[0] - window
    if starts < 1:
        raise ValueError(
            f"a corpus of {corpus_N.shape[0]} bytes has no window of {window} + 1 bytes"
        )
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    start_B = jax.random.randint(key, (batch_size,), 0, starts, jnp.int32)
    return window_at(corpus_N, start_B, window=window)


def evaluation_windows(length: int, window: int, stride: int) -> np.ndarray:
    """Lay windows over a text so that each target is scored exactly once.

    The targets are the bytes 1 ... length - 1. Window i starts at i * stride, reads `window` bytes
    and predicts start + 1 ... start + window. The first window scores all its targets, a later one
    those that the window before it did not: first_target <= t < min(start + window + 1, length).
    So every target but the first window's is predicted from more than window - stride bytes.

    Args:
        length: Number of bytes of the text.
        window: Number of bytes a model reads at once.
        stride: Distance between windows, 1 ... window.

    Returns:
        Pairs (start, first_target), int32 [N, 2]; N is 0 if there is no target. The last window
        may run past the end of the text.

    Raises:
        ValueError: `stride` is not in 1 ... window.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride {stride} is not in 1 ... window = {window}")
    if length < 2:
        return np.zeros((0, 2), np.int32)
    later = -(-max(0, length - 1 - window) // stride)
    start_N = stride * np.arange(later + 1)
    target_N = start_N + window - stride + 1
    target_N[0] = 1
    return np.stack([start_N, target_N], axis=1).astype(np.int32)


def window_at(corpus_N: jax.Array, start_B: ArrayLike, *, window: int) -> jax.Array:
    """Cut windows at given starts.

    Args:
        corpus_N: Bytes, uint8 [N].
        start_B: First byte of each window, integer [B], each in 0 ... N - 1.
        window: Number of bytes a model reads at once.

    Returns:
        Windows with one byte more for the last target, uint8 [B, window + 1]. Past the end of the
        corpus its last byte is repeated.
    """
    start_B = jnp.asarray(start_B, jnp.int32)
    index = start_B[:, None] + jnp.arange(window + 1, dtype=jnp.int32)[None, :]
    return jnp.take(corpus_N, index, mode="clip")


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _reason(error: BaseException) -> str:
    """Return what went wrong as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _existing_file(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a regular file; anything else is a DataError."""
    name = _absolute(path)
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        raise DataError(f"data.path: {name!r} does not exist; use a file that does") from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.path: {name!r} cannot be read: {_reason(error)}; use a readable file"
        ) from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise DataError(
            f"data.path: {name!r} is {kind}; use one file (plain, .gz, .xz, .bz2 or .zip)"
        )
    return Path(name)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading its decompressed content."""
    suffix = file.suffix.lower()
    if suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            if len(members) != 1:
                raise DataError(
                    f"data.path: {str(file)!r} holds {len(members)} files; use a .zip with one"
                )
            with archive.open(members[0]) as stream:
                yield stream
    else:
        with _OPENERS.get(suffix, open)(file, "rb") as stream:
            yield stream


def _read_at_most(file: Path, limit: int) -> np.ndarray:
    """Read the first `limit` bytes of a file's decompressed content, uint8 [N], read-only."""
    content = bytearray()
    try:
        with _opened(file) as stream:
            while chunk := stream.read(min(_CHUNK_BYTES, limit - len(content))):
                content += chunk
    except DataError:
        raise
    except _READ_ERRORS as error:
        raise DataError(
            f"data.path: {str(file)!r} cannot be read: {_reason(error)}; use a readable, undamaged"
            " file"
        ) from error
    data = np.frombuffer(content, np.uint8)
    data.setflags(write=False)
    return data


def _read_enwik8(file: Path) -> np.ndarray:
    """Read and verify enwik8, uint8 [100,000,000]."""
    data = _read_at_most(file, ENWIK8_BYTES + 1)
    if hashlib.sha256(data.data).hexdigest() != ENWIK8_SHA256:
        found = "more" if len(data) > ENWIK8_BYTES else f"{len(data):,}"
        raise DataError(
            f"data.path: {str(file)!r} is not enwik8, which has {ENWIK8_BYTES:,} bytes (found"
            f" {found}) of SHA-256 {ENWIK8_SHA256}; use a genuine copy, or remove this one to"
            " download it, or use data.source=file for other text"
        )
    return data


def _default_cache_dir() -> Path:
    if own := os.environ.get("KURAMOTO_JAX_CACHE"):
        return Path(_absolute(own))
    return Path(_absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "kuramoto_jax"


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _download_enwik8(url: str, part: Path) -> None:
    """Download enwik8.zip to `part`, resuming what is there, and verify it.

    Content that is found wrong is removed, an incomplete transfer is kept; both raise DataError.
    """

    def failed(reason: str) -> DataError:
        return DataError(
            f"data.source: 'enwik8' could not be downloaded: {reason}; run again (what came is"
            f" resumed), or get {url} by other means and pass --config.data.path=FILE, or use"
            " --config.data.source=stdlib"
        )

    try:
        size = _transfer(url, part)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise failed(_reason(error)) from error
    with open(part, "rb") as file:
        magic = file.read(len(_ZIP_MAGIC))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if size < ENWIK8_ZIP_BYTES and magic == _ZIP_MAGIC:
        raise failed(f"the transfer stopped after {size:,} of {ENWIK8_ZIP_BYTES:,} bytes")
    if digest != ENWIK8_ZIP_SHA256:
        part.unlink()
        raise failed("what the server sent is not enwik8.zip (its length or SHA-256 is wrong)")


def _transfer(url: str, part: Path) -> int:
    """Append to `part` what it lacks of enwik8.zip and return its size.

    Raises:
        ValueError: The server announces another length; `part` is as before.
        OSError: No connection, an HTTP error, or the transfer broke; `part` can be resumed.
        http.client.HTTPException: As OSError.
    """
    size = part.stat().st_size if part.exists() else 0
    if size >= ENWIK8_ZIP_BYTES:
        return size
    headers = {"Range": f"bytes={size}-"} if size else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        if not response.headers.get("Content-Range", "").startswith(f"bytes {size}-"):
            size = 0  # a whole answer, not the rest that was asked for
        if response.length is not None and size + response.length != ENWIK8_ZIP_BYTES:
            raise ValueError(
                f"the server offers {size + response.length:,} bytes where enwik8.zip has"
                f" {ENWIK8_ZIP_BYTES:,}"
            )
        _report(f"downloading {url} to {part.parent}")
        with open(part, "ab") as file:
            file.truncate(size)
            tenths = 10 * size // ENWIK8_ZIP_BYTES
            # One byte past the end is enough to see that the content is wrong.
            while chunk := response.read(min(_CHUNK_BYTES, ENWIK8_ZIP_BYTES + 1 - size)):
                file.write(chunk)
                size += len(chunk)
                if 10 * size // ENWIK8_ZIP_BYTES > tenths:
                    tenths = 10 * size // ENWIK8_ZIP_BYTES
                    _report(f"{10 * tenths} % of {ENWIK8_ZIP_BYTES:,} bytes")
    return size
