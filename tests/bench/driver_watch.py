# SPDX-License-Identifier: Apache-2.0
"""Memory and network traffic of a run's driver process, seen from outside. Linux only."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from dataclasses import dataclass, field

import psutil

DRIVER = "ray::TaskRunnerV1"
"""The title of the process in which verl's trainer loop runs; a method's name may follow."""

SYS_PIDFD_GETFD = 438
TCP_INFO = 11
"""`getsockopt` of linux/tcp.h; bytes acknowledged and received are its 64-bit fields at these offsets."""
BYTES_ACKED_AT, BYTES_RECEIVED_AT, TCP_INFO_SIZE = 120, 128, 232


@dataclass
class DriverWatch:
    """Samples of one driver, oldest first.

    Example:
        watch = DriverWatch(process.pid)
        while process.poll() is None:
            watch.look()
    """

    root_pid: int
    """Process id of the command that the user typed; the driver is a descendant of it."""
    resident_mib: list[float] = field(default_factory=list)
    shared_mib: list[float] = field(default_factory=list)
    """Part of `resident_mib` that other processes map too: libraries, and Ray's objects that the driver has opened."""
    _bytes: dict[str, int] = field(default_factory=dict)
    """Connection -> bytes both ways, as last seen; closed ones stay."""
    _pid: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes over all TCP connections, both ways."""
        return sum(self._bytes.values())

    def look(self) -> None:
        """Take a sample, if there is a driver."""
        try:
            self._pid = self._pid or self._find()
            if self._pid is None:
                return
            memory = psutil.Process(self._pid).memory_info()
            self.resident_mib.append(memory.rss / 2**20)
            self.shared_mib.append(memory.shared / 2**20)
            self._count()
        except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
            return  # it has ended

    def _find(self) -> int | None:
        for child in psutil.Process(self.root_pid).children(recursive=True):
            if " ".join(child.cmdline()).startswith(f"{DRIVER}.run"):
                return child.pid
        return None

    def _count(self) -> None:
        assert self._pid is not None
        libc = ctypes.CDLL(None, use_errno=True)
        pidfd = os.pidfd_open(self._pid)
        try:
            for number in os.listdir(f"/proc/{self._pid}/fd"):
                try:
                    name = os.readlink(f"/proc/{self._pid}/fd/{number}")
                except FileNotFoundError:
                    continue  # closed meanwhile
                if name.startswith("socket:"):
                    copy = libc.syscall(SYS_PIDFD_GETFD, pidfd, int(number), 0)
                    if copy >= 0:
                        self._note(name, copy)
        finally:
            os.close(pidfd)

    def _note(self, name: str, descriptor: int) -> None:
        with socket.socket(fileno=descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return
            info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, TCP_INFO_SIZE)
            (sent,) = struct.unpack_from("=Q", info, BYTES_ACKED_AT)
            (received,) = struct.unpack_from("=Q", info, BYTES_RECEIVED_AT)
            self._bytes[name] = sent + received
