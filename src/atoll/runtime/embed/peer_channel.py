"""Channel from a training loop to its peer process: starts the process, exchanges frames, stops it."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import msgspec

from atoll.base.errors import RunFailedError
from atoll.runtime.embed.messages import FromUser, LoopDetachNotice, ToUser
from atoll.runtime.system import MAXRSS_BYTES
from atoll.runtime.trainer.protocol import LENGTH

LEAVE_S = 15.0  # seconds for the peer to leave its run

_DECODER: msgspec.msgpack.Decoder[ToUser] = msgspec.msgpack.Decoder(ToUser)


class PeerChannel:
    """Socket to the peer process of one loop. A fork of the loop neither uses nor stops it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._owner_pid = -1  # the process that started the peer
        self._received = b""  # bytes of a message that is not complete yet
        self._peak_bytes = 0  # most memory that the peer process used; known once it has ended

    @property
    def is_open(self) -> bool:
        return self._process is not None

    def start(self, memory: int) -> None:
        """Start the peer process. `memory` is the descriptor of the shared mailbox; it is closed here."""
        self._socket, theirs = socket.socketpair()
        module = "atoll.runtime.embed.peer_process"
        # -P: no module comes from the working directory, which `-m` would search first
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(memory)]
        paths = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module, no shell
            command,
            pass_fds=(theirs.fileno(), memory),
            stdin=subprocess.DEVNULL,
            env=paths,
            process_group=0,  # Ctrl-C and a notebook's interrupt reach the loop only; its peer can still leave
        )
        theirs.close()
        os.close(memory)
        self._owner_pid = os.getpid()
        atexit.register(self._stop_at_exit)

    def send(self, message: FromUser) -> None:
        """Send a message. RunFailedError if the peer process has ended and left no message: that has the reason."""
        try:
            self._send(message)
        except ConnectionError:
            if not self._has_bytes():
                raise self._peer_ended() from None

    def _send(self, message: FromUser) -> None:
        body = msgspec.msgpack.encode(message)
        self._socket.sendall(LENGTH.pack(len(body)) + body)

    def has_message(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> ToUser:
        """Wait for the next message. After an interrupt the next call returns the same message."""
        (size,) = LENGTH.unpack(self._receive_bytes(LENGTH.size)[: LENGTH.size])
        message = _DECODER.decode(self._receive_bytes(LENGTH.size + size)[LENGTH.size :])
        self._received = b""
        return message

    def _receive_bytes(self, count: int) -> bytes:
        """The message so far, at least `count` bytes."""
        while len(self._received) < count:
            more = self._receive_some(count - len(self._received))
            if not more:
                raise self._peer_ended()
            self._received += more
        return self._received

    def _receive_some(self, most: int) -> bytes:
        """The next bytes; empty if the peer process has ended."""
        try:
            return self._socket.recv(most)
        except ConnectionError:
            return b""

    def _has_bytes(self) -> bool:
        """True if a peer process that has ended left a message."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except ConnectionError:
            return False

    def _peer_ended(self) -> RunFailedError:
        """The error of a peer process that ended by itself, or was killed."""
        status = self._wait_for_end()
        again = "start the program again in the same folder: it continues from the last agreed state"
        used = f"; it had used up to {self._peak_bytes / 1e9:.2f} GB of memory" if self._peak_bytes else ""
        if status == -signal.SIGKILL:
            return RunFailedError(
                "E-ATT-03",
                f"the peer process behind this loop was killed by SIGKILL{used}",
                cause="the kernel's out-of-memory killer, whose victims `dmesg` names; or a person",
                fix='free memory, or run.attach(…, state_memory="disk"), or exchange fewer values (only=…); then '
                + again,
            )
        if status < 0:
            return RunFailedError(
                "E-ATT-03",
                f"the peer process behind this loop was ended by {signal.Signals(-status).name}{used}",
                cause="native code failed, or another process sent this signal",
                fix=again,
            )
        return RunFailedError(
            "E-ATT-03",
            f"the peer process behind this loop ended with exit status {status}",
            cause="it reported the reason above or in atoll.log",
            fix=again,
        )

    def _wait_for_end(self) -> int:
        """The exit status of the peer process; negative: minus the signal that ended it."""
        process = self._process
        assert process is not None
        if process.returncode is None:
            with suppress(ChildProcessError):  # another part of the program waited for all children
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                self._peak_bytes = usage.ru_maxrss * MAXRSS_BYTES
        return process.wait()

    def stop(self) -> None:
        """Leave the run and end the peer process. Idempotent; also called when Python exits."""
        process, self._process = self._process, None
        if process is None or self._owner_pid != os.getpid():
            return
        with suppress(OSError):
            self._send(LoopDetachNotice())
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        except KeyboardInterrupt:  # a second Ctrl-C: the others notice the loss of this peer
            process.kill()
            raise
        finally:
            process.wait()
            self._socket.close()
            atexit.unregister(self._stop_at_exit)

    def _stop_at_exit(self) -> None:
        with suppress(KeyboardInterrupt):
            self.stop()
