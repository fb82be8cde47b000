"""Places for checkpoints: a folder, an object store through fsspec, a repository on the Hugging Face hub.

Invariants:
- A reader never sees half a checkpoint: its files come first, then `latest.json`, each of them whole or not at all.
  A commit on the hub has them all.
- Files that are there with the same size are not written again. Their names contain the digest of the state.
- Credentials come from the environment or from the libraries' own configuration. No URL may hold any, and error
  texts leave out those of the environment.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from atoll.base.errors import AtollError, NetworkError, UsageError
from atoll.base.ids import Digest, one_line
from atoll.crypto.digest import Buffer
from atoll.runtime.publishing.published import LATEST, LATEST_BYTES_MAX, model_folder
from atoll.runtime.storage.atomic_files import write_durably

OBJECT_STORES = {"s3": "s3fs", "memory": "fsspec"}  # scheme -> library
READ_BYTES = 2**20  # at a time
ANSWER_S = 30.0  # seconds of silence after which a web server is given up
MISSING = 404
READ = "read"
REASON_MAX = 200  # characters of a library's error
# names of environment variables with secrets that a library might repeat in an error
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class CheckpointPlace(Protocol):
    """A place that holds files by relative names. Methods raise AtollError."""

    shown: str  # for people

    def model_folder(self, round: int, state: Digest) -> str:
        """Folder of a round's model; empty: the place itself."""
        ...

    def put(self, files: Mapping[str, Sequence[Buffer]], latest: bytes, about: str) -> None:
        """Write the files that are not there, then `latest.json`."""
        ...

    def read(self, name: str) -> Generator[bytes, None, None]:
        """Bytes of a file in pieces. FileNotFoundError if there is none."""
        ...


def place_at(url: str, *, to_write: bool = False) -> CheckpointPlace:
    """The place of a path or URL. UsageError if there can be none, or if its library is missing."""
    scheme, slashes, rest = url.partition("://")
    if not slashes:
        return LocalFolder(Path(url).expanduser())
    if "@" in rest or "?" in rest:
        raise UsageError(
            "E-PUB-01",
            f"a URL of {scheme}:// must not hold credentials or options",
            cause="commands and settings are seen by others: in lists of processes, in logs, in files",
            fix="leave out what stands before @ and after ?; credentials come from the environment, such as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or HF_TOKEN",
        )
    rest = rest.rstrip("/")
    if scheme == "file":
        return LocalFolder(Path(f"/{rest.lstrip('/')}"))
    if scheme in ("http", "https") and rest and not to_write:
        return WebCheckpointSource(f"{scheme}://{rest}")
    if scheme == "hf" and rest.count("/") == 1 and all(rest.split("/")):
        return HubRepository(rest)
    if scheme in OBJECT_STORES and rest:
        return ObjectStore(scheme, rest)
    raise UsageError(
        "E-PUB-02",
        f"{one_line(url, REASON_MAX)} is no place for checkpoints",
        cause="there are folders, object stores and repositories of the Hugging Face hub; web servers only send",
        fix="write a path, s3://BUCKET/PREFIX or hf://OWNER/NAME",
    )


def read_latest(place: CheckpointPlace) -> bytes | None:
    """Bytes of `latest.json`; None if nothing is published there."""
    data = b""
    try:
        for piece in place.read(LATEST):
            data += piece
            if len(data) > LATEST_BYTES_MAX:
                break
    except FileNotFoundError:
        return None
    return data


class LocalFolder:
    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder, str(folder)

    def model_folder(self, round: int, state: Digest) -> str:
        return model_folder(round, state)

    def put(self, files: Mapping[str, Sequence[Buffer]], latest: bytes, about: str) -> None:
        with _told(self.shown, "written"):
            for name, pieces in files.items():
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists() or path.stat().st_size != size_of(pieces):
                    write_durably(path, pieces, exported=True)
            write_durably(self.folder / LATEST, (latest,), exported=True)

    def read(self, name: str) -> Generator[bytes, None, None]:
        with _told(self.shown, READ):
            yield from pieces_of(self.folder / name)


class ObjectStore:
    """A prefix in an object store, where an object appears once it is whole."""

    def __init__(self, scheme: str, path: str) -> None:
        self.shown, self._path = f"{scheme}://{path}", path
        try:
            import fsspec

            # another process writes there: no list of files is kept
            self._files = fsspec.filesystem(scheme, use_listings_cache=False)
        except ImportError as why:
            raise missing_library(self.shown, OBJECT_STORES[scheme], why) from why

    def model_folder(self, round: int, state: Digest) -> str:
        return model_folder(round, state)

    def put(self, files: Mapping[str, Sequence[Buffer]], latest: bytes, about: str) -> None:
        with _told(self.shown, "written"):
            for name, pieces in files.items():
                if self._size_of(name) != size_of(pieces):
                    self._write(name, pieces)
            self._write(LATEST, (latest,))

    def read(self, name: str) -> Generator[bytes, None, None]:
        with _told(self.shown, READ), self._files.open(f"{self._path}/{name}", "rb") as file:
            while data := file.read(READ_BYTES):
                yield data

    def _write(self, name: str, pieces: Sequence[Buffer]) -> None:
        with self._files.open(f"{self._path}/{name}", "wb") as file:
            for piece in pieces:
                for at in range(0, len(piece), READ_BYTES):  # a library may buffer what it is given at once
                    file.write(piece[at : at + READ_BYTES])

    def _size_of(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return self._files.size(f"{self._path}/{name}")
        return None


class WebCheckpointSource:
    """Checkpoints below an address that any web server may serve. Only readable."""

    def __init__(self, url: str) -> None:
        self.shown = url

    def model_folder(self, round: int, state: Digest) -> str:
        return model_folder(round, state)

    def put(self, files: Mapping[str, Sequence[Buffer]], latest: bytes, about: str) -> None:
        raise ValueError("there is no common way to write to a web server")

    def read(self, name: str) -> Generator[bytes, None, None]:
        from urllib.error import HTTPError
        from urllib.request import urlopen

        with _told(self.shown, READ):
            try:
                answer = urlopen(f"{self.shown}/{name}", timeout=ANSWER_S)  # noqa: S310  # http(s) only: place_at
            except HTTPError as why:
                why.close()
                if why.code == MISSING:
                    raise FileNotFoundError(name) from None
                raise
            with answer:
                while data := answer.read(READ_BYTES):
                    yield data


class HubRepository:
    """A model repository on the Hugging Face hub: one commit per checkpoint, with the model at its root.

    The state of the checkpoint before is removed by the next commit; the repository's history has it.
    """

    def __init__(self, name: str) -> None:
        self.shown, self._name = f"hf://{name}", name
        try:
            import huggingface_hub
        except ImportError as why:
            raise missing_library(self.shown, "huggingface_hub", why) from why
        self._hub: Any = huggingface_hub
        self._api: Any = huggingface_hub.HfApi()

    def model_folder(self, round: int, state: Digest) -> str:
        return ""

    def put(self, files: Mapping[str, Sequence[Buffer]], latest: bytes, about: str) -> None:
        from tempfile import TemporaryDirectory

        hub = self._hub
        with _told(self.shown, "written"), TemporaryDirectory() as aside:
            self._api.create_repo(self._name, exist_ok=True, private=True)  # a new one; its owner may open it
            there = set(self._api.list_repo_files(self._name))
            given = []
            for number, (name, pieces) in enumerate({**files, LATEST: (latest,)}.items()):
                path = Path(aside, str(number))  # the library reads large files from a disk
                with path.open("wb") as file:
                    file.writelines(pieces)
                given.append(hub.CommitOperationAdd(name, path))
            old = [name for name in there if name.startswith("states/") and name not in files]
            gone = [hub.CommitOperationDelete(name) for name in sorted(old)]
            self._api.create_commit(self._name, [*given, *gone], commit_message=about)

    def read(self, name: str) -> Generator[bytes, None, None]:
        from tempfile import TemporaryDirectory

        with _told(self.shown, READ), TemporaryDirectory() as aside:
            try:
                path = self._api.hf_hub_download(self._name, name, local_dir=aside)
            except (self._hub.errors.EntryNotFoundError, self._hub.errors.RepositoryNotFoundError):
                raise FileNotFoundError(name) from None
            yield from pieces_of(Path(path))


def size_of(pieces: Sequence[Buffer]) -> int:
    return sum(len(piece) for piece in pieces)


def pieces_of(path: Path) -> Generator[bytes, None, None]:
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            yield data


def missing_library(place: str, library: str, why: ImportError) -> UsageError:
    return UsageError(
        "E-PUB-03",
        f"{place} needs the library {library}, which is not here: {why}",
        cause="it is not installed with Atoll, since most runs do not publish",
        fix="pip install s3fs for s3://, pip install huggingface_hub for hf://; no library is needed for a folder",
    )


@contextmanager
def _told(place: str, what: str) -> Iterator[None]:
    """Turn what a library raises into one error without secrets. A missing file that is read stays what it is."""
    try:
        yield
    except AtollError:
        raise
    except Exception as why:
        if what == READ and isinstance(why, FileNotFoundError):
            raise
        raise NetworkError(
            "E-PUB-04",
            f"{place} cannot be {what}: {reason_of(why)}",
            cause="the place or its server is not reachable, or the credentials are missing or not enough",
            fix="check the name, the network and the credentials in the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL; HF_TOKEN), then run the same command again",
        ) from None


def reason_of(why: BaseException) -> str:
    """First line of a library's error and of its cause, without the secrets of the environment."""
    text = _first_line(why)
    if why.__cause__ is not None:
        text += f" ({_first_line(why.__cause__)})"
    for name in SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, f"${name}")
    return one_line(text, REASON_MAX)


def _first_line(why: BaseException) -> str:
    return (str(why).strip() or type(why).__name__).splitlines()[0]
