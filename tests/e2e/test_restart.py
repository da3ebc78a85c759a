"""The server may die at any time: sandboxes do not notice, and a new server takes them over."""

from __future__ import annotations

import threading
import time

from e2b import Sandbox, SandboxState
from e2e_node import remains
from guest_programs import count, start_counter, wait_beyond


def test_kill_of_the_server_loses_nothing(node):
    running = Sandbox.create("base", timeout=600, **node.options)
    paused = Sandbox.create("base", timeout=600, **node.options)
    try:
        counter = start_counter(running)
        paused.files.write("f", "kept")
        paused.pause()
        before = count(running)
        node.kill_server()
        node.up()
        wait_beyond(running, before)
        assert counter.pid in [process.pid for process in running.commands.list()]
        paused.connect(timeout=600)
        assert paused.files.read("f") == "kept"
        running.pause()
        running.connect(timeout=600)
        wait_beyond(running, before)
    finally:
        running.kill()
        paused.kill()


def test_kill_of_the_server_in_the_middle_of_verbs(node):
    """At many points of create, pause and fork; afterwards everything listed works and nothing else is left."""
    for delay_s in (0.01, 0.05, 0.12, 0.3):
        subject = Sandbox.create("base", timeout=600, **node.options)
        subject.files.write("f", "kept")

        def verbs(subject: Sandbox = subject) -> None:
            for verb in (subject.pause, lambda: subject.connect(timeout=600), lambda: subject.fork(count=2, timeout=600)):
                try:
                    verb()
                except Exception:  # noqa: BLE001 - the server is killed under it
                    return

        worker = threading.Thread(target=verbs)
        worker.start()
        time.sleep(delay_s)
        node.kill_server()
        worker.join(timeout=120)
        node.up()
        survivors = Sandbox.list(**node.options).next_items()
        assert subject.sandbox_id in [one.sandbox_id for one in survivors], f"lost after a kill at {delay_s} s"
        for one in survivors:
            again = Sandbox.connect(one.sandbox_id, timeout=600, **node.options)
            assert again.get_info().state == SandboxState.RUNNING
            assert again.files.read("f") == "kept"
            again.kill()


def test_down_pauses_and_up_brings_back(node):
    subject = Sandbox.create("base", timeout=600, **node.options)
    subject.files.write("f", "kept")
    node.aenv("down")
    assert remains() == {}
    node.up()
    assert subject.get_info().state == SandboxState.PAUSED
    subject.connect(timeout=600)
    assert subject.files.read("f") == "kept"
    subject.kill()
