"""Corpora, splits, the enwik8 download and the windows of training and evaluation."""

import bz2
import gc
import gzip
import hashlib
import http.server
import io
import lzma
import os
import socket
import threading
import time
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kuramoto_jax import data

PREFIX = Path(__file__).resolve().parents[2] / "shared" / "data" / "enwik8_prefix.gz"
SPLITS = [(0.9, 0.05, 0.05), (0.7, 0.2, 0.1), (0.8, 0.1, 0.1), (1 / 3, 1 / 3, 1 / 3)]


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def refusal(field: str, call, *args, **kwargs) -> str:
    """Return the message of the DataError that a call must raise, checked for what holds of all."""
    with pytest.raises(data.DataError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message.startswith(f"{field}: ")
    assert "\n" not in message
    return message


# Splits.


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("length", [0, 1, 2, 3, 10, 99, 100, 1001, 1_000_003])
def test_split_is_consecutive_and_complete(length, split):
    whole = np.arange(length)
    parts = data.split_bytes(whole, split)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    for part, fraction in zip(parts, split, strict=True):
        assert abs(len(part) - length * fraction) < 1.001


def test_split_lengths_by_hand():
    def lengths(length, split):
        return [len(part) for part in data.split_bytes(np.zeros(length, np.uint8), split)]

    assert lengths(100_000_000, data.ENWIK8_SPLIT) == [90_000_000, 5_000_000, 5_000_000]
    assert lengths(1_000_003, (0.9, 0.05, 0.05)) == [900_002, 50_000, 50_001]
    # In floating point 10 * (0.7 + 0.2) is below 9, and 100 * 0.29 is below 29.
    assert lengths(10, (0.7, 0.2, 0.1)) == [7, 2, 1]
    assert lengths(100, (0.29, 0.29, 0.42)) == [29, 29, 42]
    assert lengths(4, [1 - 0.5, 0.25, 0.25]) == [2, 1, 1]


@pytest.mark.parametrize(
    "split",
    [
        (),
        (0.9, 0.1),
        (0.7, 0.1, 0.1, 0.1),
        (1.0, 0.0, 0.0),
        (1.2, -0.1, -0.1),
        (0.9, 0.05, 0.06),
        (0.9, 0.05, 0.05 + 1e-8),
        (float("nan"), 0.5, 0.5),
        (float("inf"), 0.5, 0.5),
        ("a", "b", "c"),
    ],
)
def test_bad_split_is_refused(split):
    message = refusal("data.split", data.split_bytes, np.zeros(100, np.uint8), split)
    assert repr(split) in message


# Files.

TEXT = b"".join(b"%d bottles\r\n" % i for i in range(3000)) + bytes(range(256))


@pytest.mark.parametrize(
    ("name", "encode"),
    [
        ("x", bytes),
        ("x.txt", bytes),
        ("x.gz", gzip.compress),
        ("X.GZ", gzip.compress),
        ("x.xz", lzma.compress),
        ("x.bz2", bz2.compress),
        ("x.zip", lambda text: zipped(inner=text)),
        ("folder.zip", lambda text: zipped(**{"a/": b"", "a/inner": text})),
    ],
)
def test_read_file_decompresses_by_ending(tmp_path, name, encode):
    (tmp_path / name).write_bytes(encode(TEXT))
    content = data.read_file(tmp_path / name)
    assert content.dtype == np.uint8
    assert content.tobytes() == TEXT
    assert os.listdir(tmp_path) == [name]


def test_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "x").write_bytes(TEXT)
    assert data.read_file("~/x").tobytes() == TEXT
    assert data.load_corpus("file", "~/x", window=8).description == f"file {tmp_path / 'x'}"


def test_file_corpus(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(TEXT))
    corpus = data.load_corpus("file", str(path), (0.5, 0.25, 0.25), window=64)
    parts = [corpus.train, corpus.validation, corpus.test]
    assert b"".join(part.tobytes() for part in parts) == TEXT
    assert [len(part) for part in parts[:2]] == [
        len(TEXT) // 2,
        len(TEXT) * 3 // 4 - len(TEXT) // 2,
    ]
    assert corpus.sha256 == hashlib.sha256(TEXT).hexdigest()
    assert corpus.description == f"file {path}"
    assert not any(part.flags.writeable for part in parts)


@pytest.mark.parametrize("ending", ["gz", "xz", "bz2", "zip"])
@pytest.mark.parametrize("damage", ["not compressed", "cut off", "changed"])
def test_damaged_file_is_refused(tmp_path, ending, damage):
    encode = {
        "gz": gzip.compress,
        "xz": lzma.compress,
        "bz2": bz2.compress,
        "zip": lambda text: zipped(inner=text),
    }
    good = bytearray(encode[ending](TEXT))
    if damage == "not compressed":
        bad = TEXT
    elif damage == "cut off":
        bad = good[: len(good) // 2]
    else:
        good[len(good) // 2] ^= 255
        bad = good
    path = tmp_path / f"x.{ending}"
    path.write_bytes(bad)
    assert str(path) in refusal("data.path", data.read_file, path)


def test_zip_must_hold_one_file(tmp_path):
    path = tmp_path / "x.zip"
    path.write_bytes(zipped())
    assert "0 files" in refusal("data.path", data.read_file, path)
    path.write_bytes(zipped(a=b"a", b=b"b"))
    assert "2 files" in refusal("data.path", data.read_file, path)


def test_encrypted_zip_is_refused(tmp_path):
    content = bytearray(zipped(a=TEXT))
    content[6] |= 1  # the flag in the local header
    content[content.index(b"PK\x01\x02") + 8] |= 1  # and in the central directory
    (tmp_path / "x.zip").write_bytes(content)
    assert "encrypted" in refusal("data.path", data.read_file, tmp_path / "x.zip")


def test_zip_with_an_undecodable_name_is_refused(tmp_path):
    content = bytearray(zipped(a=TEXT).replace(b"a", b"\xff"))
    content[content.index(b"PK\x01\x02") + 9] |= 8  # says that the name is UTF-8
    (tmp_path / "x.zip").write_bytes(content)
    refusal("data.path", data.read_file, tmp_path / "x.zip")


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".bz2", ".zip"])
def test_content_past_the_limit_is_refused(tmp_path, ending):
    encode = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    encode |= {"": bytes, ".zip": lambda text: zipped(inner=text)}
    path = tmp_path / f"x{ending}"
    path.write_bytes(encode[ending](bytes(1_000_001)))
    assert "1,000,000 bytes" in refusal("data.path", data.read_file, path, limit=1_000_000)
    assert len(data.read_file(path, limit=1_000_001)) == 1_000_001


def test_no_file_is_refused(tmp_path):
    assert "data.path=FILE" in refusal("data.path", data.load_corpus, "file", window=8)
    missing = tmp_path / "two\nlines"
    assert "does not exist" in refusal("data.path", data.read_file, missing)
    assert "directory" in refusal("data.path", data.read_file, tmp_path)
    (tmp_path / "x").write_bytes(b"")
    assert "is empty" in refusal("data.path", data.read_file, tmp_path / "x")
    (tmp_path / "x.gz").write_bytes(gzip.compress(b""))
    assert "is empty" in refusal("data.path", data.read_file, tmp_path / "x.gz")
    assert "cannot be read" in refusal("data.path", data.read_file, tmp_path / "x" / "y")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal("data.path", data.read_file, tmp_path / "pipe")


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root reads all")
def test_unreadable_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(TEXT)
    (tmp_path / "x").chmod(0)
    assert "Permission" in refusal("data.path", data.read_file, tmp_path / "x")


@pytest.mark.parametrize(
    ("length", "name", "part"),
    [(1, "training", 0), (64, "training", 57), (300, "validation", 15), (1281, "validation", 64)],
)
def test_split_shorter_than_a_window_is_refused(tmp_path, length, name, part):
    path = tmp_path / "x"
    path.write_bytes(bytes(length))
    message = refusal("data.window", data.load_corpus, "file", str(path), window=64)
    assert (
        f"64 needs at least 65 bytes in each split, but the {name} split of file {path}" in message
    )
    assert f"({length:,} bytes) has {part};" in message


def test_shortest_corpus_is_accepted(tmp_path):
    (tmp_path / "x").write_bytes(bytes(1300))
    assert len(data.load_corpus("file", str(tmp_path / "x"), window=64).test) == 65
    split = (0.9, 0.06, 0.04)
    message = refusal(
        "data.window", data.load_corpus, "file", str(tmp_path / "x"), split, window=64
    )
    assert "the test split" in message


def test_positions_must_fit_int32(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(1000))
    monkeypatch.setattr(data, "MAX_POSITION", 908)
    data.load_corpus("file", str(tmp_path / "x"), window=8)
    monkeypatch.setattr(data, "MAX_POSITION", 907)
    refusal("data.path", data.load_corpus, "file", str(tmp_path / "x"), window=8)


def test_unknown_source_and_window_are_refused():
    message = refusal("data.source", data.load_corpus, "text8", window=8)
    assert all(source in message for source in ("'text8'", *data.SOURCES))
    refusal("data.window", data.load_corpus, "stdlib", window=0)


@pytest.mark.skipif(not PREFIX.exists(), reason="the prefix of enwik8 is not on this machine")
def test_prefix_of_enwik8():
    corpus = data.load_corpus("file", str(PREFIX), window=512)
    assert corpus.train[:10].tobytes() == b"<mediawiki"
    assert len(corpus.train) == 3_735_000
    assert len(corpus.validation) == len(corpus.test) == 207_500


# The standard library.


def test_stdlib_corpus():
    corpus = data.load_corpus("stdlib", window=512)
    whole = np.concatenate([corpus.train, corpus.validation, corpus.test]).tobytes()
    assert corpus.description.startswith("stdlib of Python 3.")
    assert corpus.sha256 == hashlib.sha256(whole).hexdigest()
    assert data.read_stdlib().tobytes() == whole
    assert len(whole) > 2_000_000
    assert whole.startswith(Path(os.__file__).with_name("__future__.py").read_bytes())
    assert Path(os.__file__).read_bytes() in whole
    assert Path(np.__file__).read_bytes() not in whole
    assert "data.source=file" in refusal("data.path", data.load_corpus, "stdlib", "x", window=8)


def test_stdlib_order_and_exclusions(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert str(tmp_path) in refusal("data.source", data.read_stdlib)
    files = ["b.py", "a/z.py", "a.py", "a/test.py", "a/data.txt", "test/x.py", "lib2to3/tests/x.py"]
    files += ["idlelib/idle_test/x.py", "site-packages/x.py", "dist-packages/x.py"]
    files += ["__pycache__/x.py"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{file};")
    assert data.read_stdlib().tobytes() == b"a.py;a/test.py;a/z.py;b.py;"


# The download of enwik8, from a local server that has a small stand-in.

CONTENT = np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8).tobytes()
ARCHIVE = zipped(enwik8=CONTENT)
PAGE = b"<!DOCTYPE html><html><body>Please log in.</body></html>"


class Server:
    """An HTTP server on this machine; its attributes say how it answers."""

    def __init__(self):
        self.content = ARCHIVE
        self.ranges = True  # honours Range
        self.announces = True  # sends Content-Length
        self.stops_after = None  # cuts the connection after this many bytes
        self.status = 200
        self.pause = 0.0
        self.requests = []  # the Range of each request, or None
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                owner.answer(self)

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/enwik8.zip"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(self, handler):
        asked = handler.headers["Range"]
        self.requests.append(asked)
        time.sleep(self.pause)
        body, status = self.content, self.status
        if asked and self.ranges and status == 200:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            body, status = body[start:], 206
        handler.send_response(status)
        if status == 206:
            total = len(self.content)
            handler.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if self.announces:
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.stops_after])

    def close(self):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(data, "ENWIK8_ZIP_BYTES", len(ARCHIVE))
    monkeypatch.setattr(data, "ENWIK8_ZIP_SHA256", hashlib.sha256(ARCHIVE).hexdigest())
    monkeypatch.setattr(data, "ENWIK8_BYTES", len(CONTENT))
    monkeypatch.setattr(data, "ENWIK8_SHA256", hashlib.sha256(CONTENT).hexdigest())
    running = Server()
    yield running
    running.close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KURAMOTO_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def failed_download(server: Server) -> str:
    message = refusal("data.source", data.enwik8_path, url=server.url)
    assert server.url in message
    assert "--config.data.path=FILE" in message
    assert "--config.data.source=stdlib" in message
    return message


def test_download_and_load(server, cache, capsys, monkeypatch):
    monkeypatch.setattr(data, "_CHUNK_BYTES", 10_000)
    assert data.enwik8_path(url=server.url) == cache / "enwik8.zip"
    assert files_of(cache) == {"enwik8.zip": ARCHIVE}
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\r" not in captured.err
    lines = captured.err.splitlines()
    assert len(lines) == 11
    assert lines[-1] == f"100 % of {len(ARCHIVE):,} bytes"

    assert data.enwik8_path(url=server.url) == cache / "enwik8.zip"
    assert server.requests == [None]
    corpus = data.load_corpus("enwik8", window=512)
    assert corpus.train.tobytes() == CONTENT[:900_000]
    assert corpus.validation.tobytes() == CONTENT[900_000:950_000]
    assert corpus.test.tobytes() == CONTENT[950_000:]
    assert corpus.description == "enwik8"
    assert corpus.sha256 == hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("announces", [True, False])
def test_cut_off_download_is_resumed(server, cache, ranges, announces):
    server.ranges, server.announces, server.stops_after = ranges, announces, 300_000
    assert f"stopped after 300,000 of {len(ARCHIVE):,} bytes" in failed_download(server)
    assert files_of(cache) == {"enwik8.zip.part": ARCHIVE[:300_000]}

    server.stops_after = None
    data.enwik8_path(url=server.url)
    assert server.requests == [None, "bytes=300000-"]
    assert files_of(cache) == {"enwik8.zip": ARCHIVE}


def test_complete_part_is_verified_and_used(server, cache):
    cache.mkdir()
    (cache / "enwik8.zip.part").write_bytes(ARCHIVE)
    data.enwik8_path(url=server.url)
    assert server.requests == []
    assert files_of(cache) == {"enwik8.zip": ARCHIVE}


@pytest.mark.parametrize("wrong", [b"PK" + bytes(99), ARCHIVE + b"x"])
def test_wrong_part_is_removed(server, cache, wrong):
    cache.mkdir()
    (cache / "enwik8.zip.part").write_bytes(wrong)
    failed_download(server)
    assert files_of(cache) == {}
    data.enwik8_path(url=server.url)
    assert files_of(cache) == {"enwik8.zip": ARCHIVE}


@pytest.mark.parametrize("announces", [True, False])
@pytest.mark.parametrize(
    "content", [ARCHIVE[:-1] + b"x", ARCHIVE + b"x", PAGE], ids=["hash", "length", "page"]
)
def test_wrong_content_is_not_kept(server, cache, content, announces):
    server.content, server.announces = content, announces
    failed_download(server)
    assert files_of(cache) == {}


def test_page_instead_of_the_rest_leaves_the_part(server, cache):
    cache.mkdir()
    (cache / "enwik8.zip.part").write_bytes(ARCHIVE[:1000])
    server.content, server.ranges = PAGE, False
    failed_download(server)
    assert files_of(cache) == {"enwik8.zip.part": ARCHIVE[:1000]}


@pytest.mark.parametrize(("status", "reason"), [(404, "HTTP Error 404"), (0, "HTTP/1.0 0")])
def test_http_error(server, cache, status, reason):
    server.status = status
    assert reason in failed_download(server)
    assert files_of(cache) == {}


def test_refused_connection(server, cache, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(server, "url", f"http://127.0.0.1:{free.getsockname()[1]}/enwik8.zip")
        assert "refused" in failed_download(server)
    assert files_of(cache) == {}


# urllib leaves the socket of a request that timed out to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_silent_server(server, cache, monkeypatch):
    monkeypatch.setattr(data, "_TIMEOUT_SECONDS", 0.1)
    server.pause = 0.3
    assert "timed out" in failed_download(server)
    assert files_of(cache) == {}
    gc.collect()


@pytest.mark.skipif(os.name == "nt", reason="files are not locked on Windows")
@pytest.mark.parametrize("first_fails", [False, True])
def test_simultaneous_downloads(server, cache, first_fails):
    server.pause = 0.3
    server.status = 404 if first_fails else 200
    results = []

    def download():
        try:
            results.append(data.enwik8_path(url=server.url))
        except data.DataError:
            server.status = 200
            results.append(None)

    threads = [threading.Thread(target=download) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(server.requests) == 1 + first_fails
    assert results.count(cache / "enwik8.zip") == 3 - first_fails
    assert files_of(cache) == {"enwik8.zip": ARCHIVE}


def test_cache_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    message = refusal(
        "data.source", data.enwik8_path, url=server.url, cache_dir=tmp_path / "file" / "cache"
    )
    assert "KURAMOTO_JAX_CACHE" in message


def test_cache_directory(monkeypatch, tmp_path):
    for name in ("own", "xdg/kuramoto_jax", "home/.cache/kuramoto_jax"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "enwik8.zip").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("KURAMOTO_JAX_CACHE", str(tmp_path / "own"))
    assert data.enwik8_path() == tmp_path / "own" / "enwik8.zip"
    monkeypatch.setenv("KURAMOTO_JAX_CACHE", "")
    assert data.enwik8_path() == tmp_path / "xdg" / "kuramoto_jax" / "enwik8.zip"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.enwik8_path() == tmp_path / "home" / ".cache" / "kuramoto_jax" / "enwik8.zip"


@pytest.mark.parametrize(("name", "content"), [("enwik8", CONTENT), ("enwik8.zip", ARCHIVE)])
def test_own_copy_of_enwik8(server, cache, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    corpus = data.load_corpus("enwik8", str(tmp_path / name), window=512)
    assert corpus.test.tobytes() == CONTENT[950_000:]
    assert not cache.exists()


def test_missing_copy_of_enwik8_is_not_downloaded(server, cache, tmp_path):
    missing = str(tmp_path / "enwik8")
    assert "does not exist" in refusal("data.path", data.enwik8_path, missing, url=server.url)
    assert server.requests == []


@pytest.mark.parametrize(
    "content",
    [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])],
    ids=["short", "long", "changed"],
)
def test_wrong_copy_of_enwik8_is_refused(server, tmp_path, content):
    (tmp_path / "enwik8.zip").write_bytes(zipped(enwik8=content))
    message = refusal(
        "data.path", data.load_corpus, "enwik8", str(tmp_path / "enwik8.zip"), window=8
    )
    assert "is not enwik8" in message


def test_enwik8_has_one_split():
    split = (0.8, 0.1, 0.1)
    assert "0.8" in refusal("data.split", data.load_corpus, "enwik8", "", split, window=8)


# Training batches.


def draw(corpus, seed, step, **sizes):
    return np.asarray(data.batch_at(jnp.asarray(corpus), seed, step, **sizes))


def test_batch_is_a_function_of_seed_and_step():
    corpus = jnp.asarray(np.random.default_rng(1).integers(0, 256, 5000, np.uint8))
    sizes = {"batch_size": 8, "window": 16}
    jitted = jax.jit(lambda seed, step: data.batch_at(corpus, seed, step, **sizes))
    seen = set()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for seed in (0, 1, 7):
            for step in (0, 1, 1000):
                batch = draw(corpus, seed, step, **sizes)
                assert batch.shape == (8, 17)
                assert batch.dtype == np.uint8
                np.testing.assert_array_equal(batch, draw(corpus, seed, step, **sizes))
                np.testing.assert_array_equal(batch, jitted(seed, step))
                seen.add(batch.tobytes())
    assert len(seen) == 9


def test_batch_does_not_depend_on_jax_settings():
    corpus = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)
    batch = draw(corpus, 3, 4, batch_size=8, window=16)
    with jax.enable_x64(True), jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(batch, draw(corpus, 3, 4, batch_size=8, window=16))


def test_batch_rows_are_windows_of_the_corpus():
    corpus = np.random.default_rng(2).integers(0, 256, 1000, np.uint8)
    for row in draw(corpus, 0, 0, batch_size=64, window=16):
        assert row.tobytes() in corpus.tobytes()


def test_all_starts_are_drawn_alike():
    corpus = np.arange(10, dtype=np.uint8)  # byte 0 included
    batch = draw(corpus, 0, 0, batch_size=7000, window=3)
    start, count = np.unique(batch[:, 0], return_counts=True)
    np.testing.assert_array_equal(start, np.arange(7))  # 10 - 3 starts, the last reads byte 9
    np.testing.assert_array_equal(batch, batch[:, :1] + np.arange(4, dtype=np.uint8))
    # Each count has mean 1000 and standard deviation 29.
    assert abs(count - 1000).max() < 150


def test_batch_of_the_shortest_corpus():
    corpus = np.arange(4, dtype=np.uint8)
    assert draw(corpus, 0, 0, batch_size=2, window=3).tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(ValueError, match=r"a corpus of 4 bytes has no window of 4 \+ 1 bytes"):
        draw(corpus, 0, 0, batch_size=2, window=4)


# Evaluation windows.


def test_evaluation_windows_by_hand():
    assert data.evaluation_windows(10, 4, 4).tolist() == [[0, 1], [4, 5], [8, 9]]
    assert data.evaluation_windows(9, 4, 4).tolist() == [[0, 1], [4, 5]]
    assert data.evaluation_windows(8, 4, 2).tolist() == [[0, 1], [2, 5], [4, 7]]
    assert data.evaluation_windows(2, 4, 1).tolist() == [[0, 1]]
    assert data.evaluation_windows(1, 4, 1).shape == (0, 2)
    assert data.evaluation_windows(10, 4, 4).dtype == np.int32


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_evaluation_scores_each_target_once(window):
    for stride in range(1, window + 1):
        for length in range(40):
            targets = []
            for start, first in data.evaluation_windows(length, window, stride):
                scored = range(first, min(start + window + 1, length))
                assert len(scored) > 0
                assert start == 0 or first - start > window - stride
                targets += scored
            assert targets == list(range(1, length))


@pytest.mark.parametrize("stride", [-1, 0, 5])
def test_bad_stride_is_refused(stride):
    with pytest.raises(ValueError, match=f"stride {stride} is not in 1"):
        data.evaluation_windows(10, 4, stride)


def test_window_repeats_the_last_byte_past_the_end():
    corpus = jnp.arange(10, 20, dtype=jnp.uint8)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        windows = data.window_at(corpus, np.array([0, 6, 8], np.int32), window=3)
    assert windows.dtype == jnp.uint8
    assert windows.tolist() == [[10, 11, 12, 13], [16, 17, 18, 19], [18, 19, 19, 19]]
