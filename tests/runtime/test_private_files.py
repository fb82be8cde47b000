"""What a peer keeps on disk is for its own user alone, and nothing that another user planted is used."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock, patch

import pytest

import atoll
from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import Digest
from atoll.base.limits import BLOB_CHUNK
from atoll.cli.hub import write_files
from atoll.crypto.digest import blob_id, manifest_of
from atoll.runtime.bootstrap import prepare_folder
from atoll.runtime.control.socket import ControlServer
from atoll.runtime.demo import DemoRun, DemoSettings
from atoll.runtime.event_log import EventLog
from atoll.runtime.storage import atomic_files, ownership
from atoll.runtime.storage.store import PeerStore


@pytest.fixture(autouse=True)
def umask_of_nothing() -> Iterator[None]:
    """The widest umask: every mode below is the program's own."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> dict[str, str]:
    """Files and folders that others may read, write or enter, with their modes."""
    places = [folder, *folder.rglob("*")]
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in places}
    return {str(path.relative_to(folder)): oct(mode) for path, mode in modes.items() if mode & 0o077}


def fill(folder: Path) -> PeerStore:
    """Everything that a peer writes by itself."""
    store = PeerStore(folder)
    store.keep([("ticket", b"ATOLL1:")])
    store.put_blob(b"a state")
    coming = manifest_of(bytes(BLOB_CHUNK + 1))
    store.open_blob(blob_id(coming), coming)
    (piece := store.new_blob()).write(b"a piece")
    piece._file.close()
    store.write_secret("peer.key", b"secret")
    store.private.write(b"moments")
    record = EventLog(folder / "facts.jsonl")
    record.write({"fact": "Opened"})
    record._turn()
    record.close()
    return store


def test_what_a_peer_writes_is_its_users_alone_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging.root, "handlers", [])
    folder = tmp_path / "run"
    prepare_folder(folder)
    logging.getLogger("atoll").warning("a line")
    store = fill(folder)
    assert {"kept.sqlite", "kept.sqlite-wal", "facts.old.jsonl", "atoll.log"} <= set(os.listdir(folder))
    assert open_to_others(folder) == {}
    store.close()
    logging.root.handlers[0].close()


def test_the_file_that_names_the_control_socket_is_private(tmp_path: Path):
    async def story() -> int:
        await (door := ControlServer(tmp_path, {})).open()
        mode = stat.S_IMODE((tmp_path / "door").stat().st_mode)
        await door.close()
        return mode

    assert asyncio.run(story()) == 0o600


def test_an_older_folder_of_our_own_is_closed_to_others(tmp_path: Path):
    """Folders were 0755 and files 0644 before; with a umask of 002 they were 0775 and 0664."""
    folder = tmp_path / "run"
    fill(folder).close()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o775 if path.is_dir() else 0o664)
    (folder / "peer.key").chmod(0o644)
    store = PeerStore(folder)
    assert store.secret("peer.key") == b"secret" and store.value("ticket") == b"ATOLL1:"
    assert {stat.S_IMODE(p.stat().st_mode) for p in (folder, folder / "blobs")} == {0o700}
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in ("kept.sqlite", "peer.key")} == {0o600}
    store.close()


def test_a_folder_of_another_user_is_refused_and_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another effective user stands for another owner; root is no exception."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    for use in (prepare_folder, PeerStore):
        with pytest.raises(UsageError, match=r"E-DIR-08 .*belongs to another user(.*\n)+.*--dir.*chown"):
            use(folder)
    assert os.listdir(folder) == [] and stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path):
    """Another user may have put files there. `chmod 700` is the way out."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o777)
    with pytest.raises(UsageError, match=r"E-DIR-09 .*mode 0o777(.*\n)+.*chmod 700"):
        PeerStore(folder)
    folder.chmod(0o700)
    PeerStore(folder).close()


def test_a_file_of_another_user_in_a_folder_that_its_group_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, real = tmp_path / "run", os.geteuid()
    folder.mkdir(mode=0o775)
    (folder / "peer.key").write_bytes(b"planted")
    owner = ownership._owner
    monkeypatch.setattr(ownership, "_owner", lambda path: real + 1 if path.name == "peer.key" else owner(path))
    with pytest.raises(UsageError, match=r"E-DIR-08 .*peer\.key"):
        PeerStore(folder)


def test_a_link_that_another_user_planted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The link leads to a private folder of our own. Our own link is followed."""
    (tmp_path / "precious").mkdir(mode=0o700)
    link, real, owner = tmp_path / "run", os.geteuid(), ownership._owner
    link.symlink_to(tmp_path / "precious")
    PeerStore(link).close()
    monkeypatch.setattr(ownership, "_owner", lambda path: real + 1 if path == link else owner(path))
    with pytest.raises(UsageError, match=r"E-DIR-08 "):
        PeerStore(link)


def test_a_secret_is_never_written_or_read_through_a_link(tmp_path: Path):
    """A link stands where the file is written first, then where it is read."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"theirs")
    store = PeerStore(tmp_path / "run")
    (store.folder / "peer.key.tmp").symlink_to(elsewhere)
    store.write_secret("peer.key", b"secret")
    assert elsewhere.read_bytes() == b"theirs" and store.secret("peer.key") == b"secret"
    (store.folder / "peer.key").unlink()
    (store.folder / "peer.key").symlink_to(elsewhere)
    with pytest.raises(UsageError, match=r"E-DIR-10 .*peer\.key"):
        store.secret("peer.key")
    store.close()


def test_a_secret_that_others_could_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = PeerStore(tmp_path / "run")
    store.write_secret("peer.key", b"secret")
    (store.folder / "peer.key").chmod(0o622)
    with pytest.raises(UsageError, match=r"E-DIR-10 .*peer\.key"):
        store.secret("peer.key")
    store.write_secret("peer.key", b"secret")
    monkeypatch.setattr(os, "geteuid", lambda: store.folder.stat().st_uid + 1)
    with pytest.raises(UsageError, match=r"E-DIR-10 .*another user"):
        store.secret("peer.key")
    assert store.secret("session.key") is None
    store.close()


def test_no_file_is_written_through_a_link(tmp_path: Path):
    """Links with known names, as they could be planted beside the blobs."""
    elsewhere, name = tmp_path / "elsewhere", Digest(b"\1" * 32)
    elsewhere.write_bytes(b"theirs")
    store = PeerStore(tmp_path / "run")
    (store.folder / "private.tmp").symlink_to(elsewhere)
    (store.folder / "blobs" / f"{name.hex()}.part").symlink_to(elsewhere)
    with pytest.raises(OSError):
        store.private.write(b"moments")
    with pytest.raises(OSError):
        atomic_files.make_room(store.folder / "blobs" / f"{name.hex()}.part", 4)
    assert elsewhere.read_bytes() == b"theirs"
    store.close()


def test_an_export_is_not_written_through_a_link(tmp_path: Path):
    """Its name aside is known beforehand. The export itself gets the mode that the umask leaves."""
    elsewhere, to = tmp_path / "elsewhere", tmp_path / "model.safetensors"
    elsewhere.write_bytes(b"theirs")
    atomic_files.aside(to).symlink_to(elsewhere)
    os.umask(0o022)
    atomic_files.write_durably(to, (b"a model",), exported=True)
    assert elsewhere.read_bytes() == b"theirs" and to.read_bytes() == b"a model" and not to.is_symlink()
    assert stat.S_IMODE(to.stat().st_mode) == 0o644


def test_a_model_folder_is_not_written_into_a_folder_that_another_user_may_have_made(tmp_path: Path):
    """The folder gets the mode that the umask leaves only when it is complete."""
    os.umask(0o022)
    to = tmp_path / "model"
    (planted := tmp_path / "model.partial").mkdir()
    planted.chmod(0o777)
    with pytest.raises(UsageError, match=r"E-DIR-09 .*model\.partial(.*\n)+.*another place"):
        write_files({"config.json": (b"{}",)}, to)
    assert not os.listdir(planted) and not to.exists()
    planted.rmdir()
    write_files({"config.json": (b"{}",)}, to)
    assert stat.S_IMODE(to.stat().st_mode) == 0o755 and os.listdir(to) == ["config.json"]


def test_folders_of_a_swarm_do_not_lie_in_one_that_others_can_change(tmp_path: Path):
    """Its user may swap them. One that others only read stays as it is: it may hold other things, too."""
    (script := tmp_path / "train.py").write_text("")
    for mode in (0o777, 0o755):
        (base := tmp_path / oct(mode)).mkdir(mode=mode)
        (base / "other").touch()
        with pytest.raises((UsageError, RunFailedError)) as local:
            atoll.local(script, peers=2, folder=base)
        swarm = DemoRun(DemoSettings(peers=1), base, lambda text: None)
        no_founder = AsyncMock(side_effect=RunFailedError("E-TST-01", "not today"))
        with patch.object(swarm, "_found", no_founder), pytest.raises((UsageError, RunFailedError)) as demo:
            asyncio.run(swarm.run())
        codes = [why.value.code for why in (local, demo)]
        assert codes == (["E-DIR-09"] * 2 if mode == 0o777 else ["E-LOC-02", "E-TST-01"])
        assert "folder=" in str(local.value) or mode != 0o777
        assert stat.S_IMODE(base.stat().st_mode) == mode


def test_a_secret_that_its_group_can_write_to_is_closed(tmp_path: Path):
    """Kubernetes opens a whole volume to the `fsGroup` at every start, and a umask of 002 leaves copies so."""
    folder = tmp_path / "run"
    store = PeerStore(folder)
    store.write_secret("peer.key", b"secret")
    store.close()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o2770 if path.is_dir() else 0o660)
    store = PeerStore(folder)
    assert store.secret("peer.key") == b"secret"
    assert stat.S_IMODE((folder / "peer.key").stat().st_mode) == 0o600
    store.close()


@pytest.mark.parametrize("mode", [0o777, 0o755])
def test_a_file_system_without_modes_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int):
    """A new folder shows another mode than the one that it was made with. None is left behind."""
    made = Path.mkdir

    def make(self: Path, *args: int, **words: bool) -> None:
        made(self, *args, **words)
        os.chmod(self, mode)

    monkeypatch.setattr(Path, "mkdir", make)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"E-DIR-12 .*(.*\n)+.*keeps no owners or modes(.*\n)+.*local disk"):
            PeerStore(tmp_path / "run")


@pytest.mark.parametrize("mode", [0o755, 0o775])
def test_a_folder_that_holds_other_things_is_not_closed(tmp_path: Path, mode: int):
    """`--dir .` or `--dir ~`: other users may need what lies there. An empty one is closed, and one with a run."""
    (home := tmp_path / "home").mkdir()
    (home / "public_html").mkdir()
    home.chmod(mode)
    with pytest.raises(UsageError, match=r"E-DIR-11 .*home(.*\n)+.*--dir \S+home/atoll-run"):
        prepare_folder(home)
    assert stat.S_IMODE(home.stat().st_mode) == mode and os.listdir(home) == ["public_html"]
    (home / "public_html").rmdir()
    PeerStore(home).close()
    home.chmod(mode)
    PeerStore(home).close()
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
