"""Remote folders: right bytes, every chunk fetched once a node, and failures that end in success or in a clear error."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mmds.data import node_cache
from mmds.data.object_store import _lasts
from mmds.data.remote import RemoteFolder, is_remote
from mmds.errors import ConfigError, DataError

URL = "memory://bucket/set"
CHUNK = 100
SHARD = bytes(random.Random(7).randbytes(950))  # nine and a half chunks


class Memory:
    """The memory filesystem with its requests written down.

    ranges: of every ranged read. faults: what the next ranged reads do instead of answering: raise, or lose bytes at the end.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self.faults: list[Exception | int] = []

    def put(self, name: str, data: bytes) -> None:
        MemoryFileSystem().pipe_file(f"{URL}/{name}", data)

    def remove(self, name: str) -> None:
        MemoryFileSystem().rm(f"{URL}/{name}")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """One shard in memory."""
    made, answer = Memory(), MemoryFileSystem.cat_file

    def cat_file(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        made.ranges.append((path.rpartition("/")[2], start, end))
        fault = made.faults.pop(0) if made.faults else 0
        if isinstance(fault, Exception):
            raise fault
        return bytes(answer(self, path, start, end - fault))

    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    made.put("shard.tar", SHARD)
    return made


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., RemoteFolder]:
    """Opens the folder with small chunks; every instance shares one cache."""

    def open_it(**options: Any) -> RemoteFolder:
        defaults = {"cache": tmp_path / "cache", "cache_bytes": 10_000, "chunk_bytes": CHUNK}
        return RemoteFolder(URL, **{**defaults, "sleep": lambda _: None, **options})

    return open_it


def kept(cache: Path) -> list[Path]:
    return [path for path in (cache / "chunks").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/set", True),
        ("memory://set", True),
        ("gs://bucket", True),
        ("simplecache::s3://bucket/set", True),
        ("shards/mine", False),
        ("/data/a://b", False),
        ("C:/data", False),
        ("C:\\data", False),
        ("C://data", False),
        ("local-dir:/models/x", False),
        ("local-dir://models/x", False),
        ("a:b", False),
        ("", False),
    ],
)
def test_what_counts_as_remote(path: str, expected: bool) -> None:
    assert is_remote(path) is expected


def test_any_range_is_read_rightly_and_every_chunk_fetched_once(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    folder = opened()
    for offset, size in itertools.product(range(0, 951, 19), (0, 1, 99, 100, 101, 350)):
        if offset + size <= len(SHARD):
            assert folder.read("shard.tar", offset, size) == SHARD[offset : offset + size]
    assert sorted(memory.ranges) == [("shard.tar", at, min(at + CHUNK, 950)) for at in range(0, 950, CHUNK)]


def test_the_cache_outlives_the_process_and_serves_copies(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    folder = opened(sleep=time.sleep)
    folder.read("shard.tar", 0, 950)
    memory.ranges.clear()
    assert opened().read("shard.tar", 5, 500) == SHARD[5:505]
    assert pickle.loads(pickle.dumps(folder)).read("shard.tar", 5, 500) == SHARD[5:505]
    assert not memory.ranges


def test_chunks_of_another_size_do_not_meet(memory: Memory, opened: Callable[..., RemoteFolder]) -> None:
    opened().read("shard.tar", 0, 950)
    assert opened(chunk_bytes=70).read("shard.tar", 0, 950) == SHARD
    memory.ranges.clear()
    for size in (CHUNK, 70):
        assert opened(chunk_bytes=size).read("shard.tar", 0, 950) == SHARD
    assert not memory.ranges


def test_beyond_the_cap_the_chunks_not_used_for_longest_go(
    memory: Memory, opened: Callable[..., RemoteFolder], tmp_path: Path
) -> None:
    folder = opened(cache_bytes=400)
    for chunk in (0, 1, 2, 3, 0, 4):  # the fifth chunk needs room: 1 and 2 are the oldest by then
        time.sleep(0.02)
        folder.read("shard.tar", chunk * CHUNK, 10)
        assert sum(path.stat().st_size for path in kept(tmp_path / "cache")) <= 400
    memory.ranges.clear()
    for chunk in (0, 3, 4, 1):
        folder.read("shard.tar", chunk * CHUNK, 10)
    assert memory.ranges == [("shard.tar", 100, 200)]


def test_a_cap_that_just_suffices_removes_nothing(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    for _ in range(3):
        assert opened(cache_bytes=950).read("shard.tar", 0, 950) == SHARD
    assert len(memory.ranges) == 10


def test_a_chunk_removed_while_it_is_read_is_still_read(
    memory: Memory, opened: Callable[..., RemoteFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened()
    folder.read("shard.tar", 0, 10)

    def utime(_: int) -> None:
        for path in kept(tmp_path / "cache"):
            path.unlink()

    monkeypatch.setattr(node_cache.os, "utime", utime)
    assert folder.read("shard.tar", 0, 10) == SHARD[:10]
    assert len(memory.ranges) == 1 and not kept(tmp_path / "cache")


def test_a_chunk_cut_short_by_a_power_failure_is_fetched_again(
    memory: Memory, opened: Callable[..., RemoteFolder], tmp_path: Path
) -> None:
    folder = opened()
    folder.read("shard.tar", 0, 10)
    os.truncate(kept(tmp_path / "cache")[0], 50)
    assert folder.read("shard.tar", 0, 10) == SHARD[:10]
    assert folder.read("shard.tar", 0, 10) == SHARD[:10]
    assert len(memory.ranges) == 2


def test_a_replaced_object_is_read_anew_by_the_next_start(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    assert opened().read("shard.tar", 0, 10) == SHARD[:10]
    memory.put("shard.tar", SHARD[::-1])
    assert opened().read("shard.tar", 0, 10) == SHARD[::-1][:10]


@pytest.mark.parametrize("replacement", [SHARD[::-1], SHARD[:150]], ids=["same size", "shorter"])
def test_an_object_replaced_between_two_reads_is_an_error_and_leaves_no_chunk(
    replacement: bytes, memory: Memory, opened: Callable[..., RemoteFolder], tmp_path: Path
) -> None:
    folder = opened()
    folder.read("shard.tar", 0, 10)
    memory.put("shard.tar", replacement)
    with pytest.raises(DataError, match=r"memory://bucket/set/shard.tar was replaced while .* start again"):
        folder.read("shard.tar", 100, 100)
    assert len(kept(tmp_path / "cache")) == 1


def test_a_read_beyond_the_end_names_both_sizes(memory: Memory, opened: Callable[..., RemoteFolder]) -> None:
    with pytest.raises(DataError, match=r"shard.tar is cut short: it has 950 bytes, and bytes 900 to 951"):
        opened().read("shard.tar", 900, 51)
    assert not memory.ranges


class ServerDisconnectedError(Exception):
    """Like aiohttp's: no OSError."""


def test_passing_errors_are_tried_again_after_growing_pauses(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    memory.faults = [OSError(121, "Remote I/O error"), TimeoutError(), ServerDisconnectedError(), 3]
    pauses: list[float] = []
    stream = random.getstate()
    assert opened(sleep=pauses.append).read("shard.tar", 0, 10) == SHARD[:10]
    assert len(memory.ranges) == 5
    assert len(pauses) == 4
    assert all(step / 2 <= pause <= step for step, pause in zip((1, 2, 4, 8), pauses, strict=True))
    assert random.getstate() == stream


def test_pauses_differ_between_processes_and_are_bounded(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    memory.faults = [OSError() for _ in range(24)]
    pauses: list[float] = []
    opened(sleep=pauses.append, attempts=25).read("shard.tar", 0, 10)
    assert max(pauses) <= 60 and len({round(pause, 6) for pause in pauses[-10:]}) == 10


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (OSError(16, "Please reduce your request rate."), r"OSError: .*Please reduce your request rate"),
        (40, r"OSError: 60 instead of 100 bytes arrived"),
        (-5, r"OSError: 105 instead of 100 bytes arrived"),
    ],
    ids=["busy", "short", "long"],
)
def test_after_the_last_attempt_the_error_says_what_was_tried(
    fault: Exception | int,
    reason: str,
    memory: Memory,
    opened: Callable[..., RemoteFolder],
    tmp_path: Path,
) -> None:
    memory.faults = [fault] * 3
    with pytest.raises(
        DataError,
        match=r"cannot read memory://bucket/set/shard.tar bytes 300 to 400: 3 attempts failed, the last with "
        + reason,
    ):
        opened(attempts=3).read("shard.tar", 310, 5)
    assert len(memory.ranges) == 3 and not kept(tmp_path / "cache")
    assert opened().read("shard.tar", 310, 5) == SHARD[310:315]


@pytest.mark.parametrize(
    "error", [PermissionError("Access Denied"), FileNotFoundError("gone"), OSError(22, "Bad Request")]
)
def test_lasting_errors_are_not_tried_again(
    error: Exception, memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    memory.faults = [error]
    pauses: list[float] = []
    with pytest.raises(DataError, match=rf"bytes 0 to 100: {type(error).__name__}"):
        opened(sleep=pauses.append).read("shard.tar", 0, 10)
    assert not pauses and len(memory.ranges) == 1


@pytest.mark.parametrize(
    ("status", "lasts"), [(400, True), (403, True), (408, False), (429, False), (503, False)]
)
def test_http_statuses_that_another_attempt_may_mend(status: int, lasts: bool) -> None:
    error = Exception("as of aiohttp or gcsfs")
    error.status = status  # type: ignore[attr-defined]
    assert _lasts(error) is lasts


def test_a_missing_object_is_named_and_not_remembered(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    pauses: list[float] = []
    folder = opened(sleep=pauses.append)
    for read in (lambda: folder.read("other.tar", 0, 1), lambda: folder.local("other.tar")):
        with pytest.raises(DataError, match="memory://bucket/set/other.tar is missing"):
            read()
    assert not folder.exists("other.tar") and folder.exists("shard.tar")
    memory.put("other.tar", b"x")
    assert folder.exists("other.tar") and folder.read("other.tar", 0, 1) == b"x"
    assert not folder.exists("") and not pauses  # the folder itself is no file


def test_a_whole_file_is_downloaded_once_in_ranges(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    memory.put("index/a.npy", SHARD[:250])
    path = opened().local("index/a.npy", 250)
    assert path.read_bytes() == SHARD[:250] and path.name == "a.npy"
    assert opened().local("index/a.npy") == path
    assert memory.ranges == [("a.npy", 0, 100), ("a.npy", 100, 200), ("a.npy", 200, 250)]


def test_an_empty_file_needs_no_read(memory: Memory, opened: Callable[..., RemoteFolder]) -> None:
    memory.put("ids.bin", b"")
    assert opened().local("ids.bin", 0).read_bytes() == b"" and not memory.ranges
    assert opened().read("ids.bin", 0, 0) == b""


def test_a_whole_file_replaces_its_earlier_version(
    memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    memory.put("index/a.npy", b"old")
    memory.put("index/b.npy", b"other")
    old, other = opened().local("index/a.npy"), opened().local("index/b.npy")
    memory.put("index/a.npy", b"new")
    new = opened().local("index/a.npy")
    assert new.read_bytes() == b"new" and other.read_bytes() == b"other" and not old.exists()


@pytest.mark.parametrize(("size", "kind"), [(951, "is cut short"), (949, "is too long")])
def test_a_whole_file_of_another_size_is_refused(
    size: int, kind: str, memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    with pytest.raises(DataError, match=rf"memory://bucket/set/shard.tar {kind}: 950 of {size} bytes"):
        opened().local("shard.tar", size)
    assert not memory.ranges


def test_a_download_that_fails_midway_leaves_nothing(
    memory: Memory, opened: Callable[..., RemoteFolder], tmp_path: Path
) -> None:
    memory.faults = [0, 0, PermissionError("expired")]
    with pytest.raises(DataError, match="bytes 200 to 300: PermissionError: expired"):
        opened().local("shard.tar")
    cache = tmp_path / "cache"
    assert not [path for folder in ("files", "partial") for path in (cache / folder).rglob("*")]
    assert opened().local("shard.tar").read_bytes() == SHARD


@pytest.mark.parametrize("name", ["../manifest.json", "index/../../x", "/etc/passwd"])
def test_names_outside_the_folder_are_refused(
    name: str, memory: Memory, opened: Callable[..., RemoteFolder]
) -> None:
    with pytest.raises(DataError, match="is not the name of a file in the folder"):
        opened().local(name)


def test_the_cache_is_set_by_the_environment(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    RemoteFolder(URL).read("shard.tar", 0, 1)
    assert kept(tmp_path / ".cache" / "mmds" / "remote")
    monkeypatch.setenv("MMDS_CACHE", str(tmp_path / "chosen"))
    monkeypatch.setenv("MMDS_CACHE_BYTES", "250")
    folder = RemoteFolder(URL, chunk_bytes=CHUNK)
    for offset in range(0, 900, CHUNK):
        folder.read("shard.tar", offset, 1)
    assert 0 < sum(path.stat().st_size for path in kept(tmp_path / "chosen")) <= 250
    with pytest.raises(ConfigError, match="cache of 250 bytes cannot hold one chunk .* MMDS_CACHE_BYTES"):
        RemoteFolder(URL)
    monkeypatch.setenv("MMDS_CACHE_BYTES", "32GiB")
    with pytest.raises(ConfigError, match="MMDS_CACHE_BYTES='32GiB' is not a number of bytes"):
        RemoteFolder(URL)


def test_a_cache_that_cannot_be_used_is_named(memory: Memory, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"cache folder .*/file/cache cannot be used: Not a directory; set MMDS_CACHE"
    ):
        RemoteFolder(URL, cache=tmp_path / "file" / "cache")


def test_a_full_disk_is_not_taken_for_the_store(
    memory: Memory, opened: Callable[..., RemoteFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_cache.NodeCache, "keep_chunk", full)
    with pytest.raises(DataError, match="cannot be used: No space left on device; set MMDS_CACHE"):
        folder.read("shard.tar", 0, 1)
    assert len(memory.ranges) == 1


def test_a_protocol_without_its_package_is_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"nosuch://bucket cannot be opened: Protocol not known"):
        RemoteFolder("nosuch://bucket")


def test_threads_share_one_fetch(
    memory: Memory, opened: Callable[..., RemoteFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = MemoryFileSystem.cat_file

    def slow(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        time.sleep(0.05)
        return answer(self, path, start, end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", slow)
    folder, got = opened(), []
    threads = [
        threading.Thread(target=lambda: got.append(folder.read("shard.tar", 0, 150))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == [SHARD[:150]] * 4 and len(memory.ranges) == 2


def _read_and_die(folder: RemoteFolder, where: str) -> None:
    rename = Path.rename

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def rename_and_die(part: Path, target: Path) -> None:
        rename(part, target)
        die()

    if where == "fetch":
        MemoryFileSystem.cat_file = die
    else:
        Path.rename = die if where == "before" else rename_and_die  # type: ignore[assignment,method-assign]
    folder.read("shard.tar", 0, 10)


def _killed(folder: RemoteFolder, where: str) -> None:
    process = get_context("fork").Process(target=_read_and_die, args=(folder, where))
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("where", ["fetch", "before"])
def test_a_killed_process_leaves_neither_a_chunk_nor_a_lock(
    where: str, memory: Memory, opened: Callable[..., RemoteFolder], tmp_path: Path
) -> None:
    _killed(opened(cache_bytes=950), where)
    cache = tmp_path / "cache"
    assert not kept(cache) and len(list((cache / "partial").iterdir())) == (where == "before")
    folder = opened(cache_bytes=950)
    assert not list((cache / "partial").iterdir())
    assert folder.read("shard.tar", 0, 950) == SHARD
    assert len(kept(cache)) == 10  # what the killed process had counted as kept takes no room from the others


def test_a_process_killed_just_after_it_kept_a_chunk_does_not_let_the_cache_outgrow_its_cap(
    memory: Memory, opened: Callable[..., RemoteFolder], tmp_path: Path
) -> None:
    opened(cache_bytes=300).read("shard.tar", 900, 10)
    _killed(opened(cache_bytes=300), "after")
    assert len(kept(tmp_path / "cache")) == 2
    for offset in range(100, 900, 10):
        opened(cache_bytes=300).read("shard.tar", offset, 10)
        assert sum(path.stat().st_size for path in kept(tmp_path / "cache")) <= 300


def test_a_file_being_written_is_not_taken_for_abandoned(
    memory: Memory, opened: Callable[..., RemoteFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, folder = MemoryFileSystem.cat_file, opened()

    def meanwhile(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        opened()  # another process starts
        assert len(list((tmp_path / "cache" / "partial").iterdir())) == 1
        return answer(self, path, start, end)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", meanwhile)
    assert folder.local("shard.tar").read_bytes() == SHARD


class S3:
    """A real HTTP server that speaks S3, with its requests written down.

    gets: (key, Range header) of every GET of an object. faults: what the next such GETs answer: an HTTP status, or "cut" for
    a connection that ends in the middle of the body.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.gets: list[tuple[str, str]] = []
        self.faults: list[int | str] = []
        self._store = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.url)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] == "GET" and not environ["QUERY_STRING"].startswith("list-type"):
            self.gets.append((environ["PATH_INFO"], environ.get("HTTP_RANGE", "")))
            fault = self.faults.pop(0) if self.faults else None
            if fault == "cut":
                start_response("206 Partial Content", [("Content-Length", "100")])
                return [b"x" * 40]
            if fault is not None:
                start_response(f"{fault} Fault", [("Content-Type", "application/xml")])
                return [b"<Error><Code>%d</Code><Message>no luck</Message></Error>" % fault]
        return self._store(environ, start_response)


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    variables = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        made = S3()
        patch.setenv("AWS_ENDPOINT_URL", made.url)
        made.client().create_bucket(Bucket="bucket")
        yield made
        made.close()


@pytest.fixture
def s3(server: S3) -> S3:
    """The server with two shards and an index file."""
    for name, data in (("a.tar", SHARD), ("b.tar", SHARD[::-1]), ("index/key.npy", SHARD[:250])):
        server.client().put_object(Bucket="bucket", Key=f"set/{name}", Body=data)
    server.gets.clear()
    server.faults.clear()
    return server


def _no_pause(_: float) -> None:
    """A pause that can be pickled."""


def _s3_folder(cache: Path, cache_bytes: int = 10_000, attempts: int = 5) -> RemoteFolder:
    return RemoteFolder(
        "s3://bucket/set",
        cache=cache,
        cache_bytes=cache_bytes,
        chunk_bytes=CHUNK,
        attempts=attempts,
        sleep=_no_pause,
    )


def _read_at_random(cache: Path, cache_bytes: int, seed: int, barrier: Any) -> None:
    folder, draw = _s3_folder(cache, cache_bytes), random.Random(seed)
    barrier.wait(60)
    assert folder.local("index/key.npy", 250).read_bytes() == SHARD[:250]
    shards = {"a.tar": SHARD, "b.tar": SHARD[::-1]}
    for _ in range(60):
        name, offset = draw.choice(list(shards)), draw.randrange(900)
        size = draw.randrange(min(250, 950 - offset))
        assert folder.read(name, offset, size) == shards[name][offset : offset + size]


def _three_processes(cache: Path, cache_bytes: int) -> None:
    context = get_context("spawn")
    barrier = context.Barrier(3)
    processes = [
        context.Process(target=_read_at_random, args=(cache, cache_bytes, seed, barrier)) for seed in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_three_processes_fetch_every_chunk_of_s3_once(s3: S3, tmp_path: Path) -> None:
    _three_processes(tmp_path, 1900)
    expected = [
        (f"/bucket/set/{name}", f"bytes={start}-{min(start + CHUNK, size) - 1}")
        for name, size in (("a.tar", 950), ("b.tar", 950), ("index/key.npy", 250))
        for start in range(0, size, CHUNK)
    ]
    assert Counter(s3.gets) == Counter(expected)


def test_three_processes_read_rightly_beyond_a_small_cap(s3: S3, tmp_path: Path) -> None:
    _three_processes(tmp_path, 500)
    assert len(s3.gets) > 60  # chunks had to be fetched again, so some were removed while others read
    assert sum(path.stat().st_size for path in kept(tmp_path)) <= 500


def test_a_forked_worker_opens_its_own_connection(s3: S3, tmp_path: Path) -> None:
    process = get_context("spawn").Process(target=_read_fork_and_read, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert Counter(s3.gets) == Counter(
        [("/bucket/set/a.tar", f"bytes={start}-{start + 99}") for start in (0, 100, 200)]
    )


def _read_fork_and_read(cache: Path) -> None:
    folder = _s3_folder(cache)
    assert folder.read("a.tar", 0, 10) == SHARD[:10]
    child = get_context("fork").Process(target=_check_read, args=(folder, 100))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    _check_read(folder, 200)  # the parent's own connection still works


def _check_read(folder: RemoteFolder, offset: int) -> None:
    assert folder.read("a.tar", offset, 10) == SHARD[offset : offset + 10]


def test_what_s3_could_not_answer_is_asked_again(s3: S3, tmp_path: Path) -> None:
    s3.faults = [500, 503, "cut", 429]
    assert _s3_folder(tmp_path).read("a.tar", 0, 10) == SHARD[:10]
    assert s3.gets == [("/bucket/set/a.tar", "bytes=0-99")] * 5


@pytest.mark.parametrize("fault", [503, "cut"])
def test_neither_s3fs_nor_botocore_adds_attempts_to_ours(fault: int | str, s3: S3, tmp_path: Path) -> None:
    folder = _s3_folder(tmp_path, attempts=1)
    folder.read("b.tar", 0, 10)
    s3.gets.clear()
    for used in (folder, pickle.loads(pickle.dumps(folder))):
        s3.faults = [fault]
        with pytest.raises(DataError, match="1 attempts failed"):
            used.read("a.tar", 0, 10)
    assert len(s3.gets) == 2


def test_an_s3_object_that_became_shorter_is_named_as_replaced(s3: S3, tmp_path: Path) -> None:
    folder = _s3_folder(tmp_path)
    folder.read("a.tar", 0, 10)
    s3.client().put_object(Bucket="bucket", Key="set/a.tar", Body=SHARD[:50])
    with pytest.raises(
        DataError, match="s3://bucket/set/a.tar was replaced .* 950 bytes, is now .* 50 bytes"
    ):
        folder.read("a.tar", 100, 10)


def test_what_s3_denies_is_asked_once(s3: S3, tmp_path: Path) -> None:
    s3.faults = [403]
    with pytest.raises(
        DataError, match=r"cannot read s3://bucket/set/a.tar bytes 0 to 100: PermissionError: no luck"
    ):
        _s3_folder(tmp_path).read("a.tar", 0, 10)
    assert len(s3.gets) == 1
    folder = _s3_folder(tmp_path)
    with pytest.raises(DataError, match="s3://bucket/set/c.tar is missing"):
        folder.read("c.tar", 0, 10)
    assert not folder.exists("c.tar") and not folder.exists("index")


def test_a_replaced_s3_object_is_noticed(s3: S3, tmp_path: Path) -> None:
    folder = _s3_folder(tmp_path)
    assert folder.read("a.tar", 0, 10) == SHARD[:10]
    s3.client().put_object(Bucket="bucket", Key="set/a.tar", Body=SHARD[::-1])
    with pytest.raises(DataError, match="s3://bucket/set/a.tar was replaced while it was being read"):
        folder.read("a.tar", 100, 10)
    assert _s3_folder(tmp_path).read("a.tar", 0, 200) == SHARD[::-1][:200]
