"""Only sockets that came with the group are cut. Linux only, as the module itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from horovod_ft.membership import sockets
from horovod_ft.membership.sockets import SocketCutter, open_sockets

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")


class Pairs:
    """Makes connected sockets and closes them at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def local(self) -> tuple[socket.socket, socket.socket]:
        left, right = socket.socketpair()
        return self._keep(left), self._keep(right)

    def tcp(self) -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = self._keep(socket.create_connection(server.getsockname()))
            far = self._keep(server.accept()[0])
        return near, far

    def _keep(self, one: socket.socket) -> socket.socket:
        one.settimeout(5)
        return self._stack.enter_context(one)


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    with ExitStack() as stack:
        yield Pairs(stack)


@pytest.fixture
def cutter() -> SocketCutter:
    return SocketCutter()


def works(near: socket.socket, far: socket.socket) -> bool:
    """Whether what goes in at one end comes out at the other. False at an end of file."""
    try:
        near.sendall(b"x")
    except BrokenPipeError:
        return False
    return far.recv(1) == b"x"


def test_the_sockets_of_this_process_are_found(pairs: Pairs) -> None:
    left, right = pairs.local()
    assert {left.fileno(), right.fileno()} <= open_sockets().keys()


def test_files_and_pipes_are_no_sockets() -> None:
    read, write = os.pipe()
    try:
        assert not {read, write} & open_sockets().keys()
    finally:
        os.close(read)
        os.close(write)


def test_where_there_is_no_proc_there_is_nothing_to_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "FD_FOLDER", Path("/nowhere"))
    assert open_sockets() == {}


def test_a_socket_that_came_with_the_group_is_cut(cutter: SocketCutter, pairs: Pairs) -> None:
    cutter.forming()
    near, far = pairs.tcp()
    cutter.formed()
    far.close()  # the other end belongs to another process
    assert cutter.cut() == 1
    assert near.recv(1) == b""


def test_the_neighbour_sees_an_end_of_file(cutter: SocketCutter, pairs: Pairs) -> None:
    cutter.forming()
    near, far = pairs.tcp()
    cutter.formed()
    cutter.cut()
    assert far.recv(1) == b""
    assert not works(near, far)


def test_a_socket_from_before_is_left_alone(cutter: SocketCutter, pairs: Pairs) -> None:
    before = pairs.local()
    cutter.forming()
    pairs.local()
    cutter.formed()
    cutter.cut()
    assert works(*before)


def test_a_socket_from_after_is_left_alone(cutter: SocketCutter, pairs: Pairs) -> None:
    cutter.forming()
    cutter.formed()
    after = pairs.local()
    assert cutter.cut() == 0
    assert works(*after)


def test_a_descriptor_that_was_given_to_something_else_is_left_alone(cutter: SocketCutter, pairs: Pairs) -> None:
    cutter.forming()
    near, far = pairs.local()
    cutter.formed()
    others = pairs.local()
    for old, new in zip((near, far), others, strict=True):
        os.dup2(new.fileno(), old.fileno())
    assert cutter.cut() == 0
    assert works(*others)


def test_a_descriptor_from_before_that_the_group_reuses_is_cut(cutter: SocketCutter, pairs: Pairs) -> None:
    old, far_old = pairs.local()
    cutter.forming()
    near, far = pairs.local()
    os.dup2(near.fileno(), old.fileno())
    near.close()
    cutter.formed()
    assert cutter.cut() == 2
    assert far.recv(1) == b""
    far_old.close()


def test_a_second_cut_finds_nothing(cutter: SocketCutter, pairs: Pairs) -> None:
    cutter.forming()
    pairs.local()
    cutter.formed()
    assert [cutter.cut(), cutter.cut()] == [2, 0]


def test_a_socket_that_is_not_connected_does_not_count(cutter: SocketCutter) -> None:
    cutter.forming()
    with socket.socket() as unconnected:
        cutter.formed()
        assert unconnected.fileno() in open_sockets()
        assert cutter.cut() == 0


def test_the_next_group_has_sockets_of_its_own(cutter: SocketCutter, pairs: Pairs) -> None:
    cutter.forming()
    first = pairs.local()
    cutter.formed()
    cutter.forming()
    second = pairs.local()
    cutter.formed()
    assert cutter.cut() == 2
    assert works(*first)
    assert not works(*second)
