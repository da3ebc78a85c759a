from __future__ import annotations

from dataclasses import fields, replace

import pytest

from agentenv.core.errors import Conflict, SnapshotOfAnotherHost
from agentenv.core.model import VmIdentity
from agentenv.vmm.identity import differences, refuse_mismatch

MADE = VmIdentity("qemu", "tcg", "max", "10.0.2", "k" * 64, "i" * 64, 2_000_000, "microvm,acpi=on")


def test_the_same_host_is_accepted() -> None:
    assert differences(MADE, MADE) == []
    refuse_mismatch(MADE, MADE)


@pytest.mark.parametrize("name", ["driver", "accelerator", "cpu_model", "vmm_version", "tsc_khz", "machine_type"])
def test_each_difference_is_named_with_both_sides(name: str) -> None:
    here = replace(MADE, **{name: 3_000_000 if name == "tsc_khz" else "other"})
    with pytest.raises(SnapshotOfAnotherHost) as caught:
        refuse_mismatch(MADE, here)
    assert name in caught.value.message
    assert str(getattr(here, name)) in caught.value.message
    assert isinstance(caught.value, Conflict)
    assert "memory false" in caught.value.hint


@pytest.mark.parametrize("name", ["kernel_sha256", "initramfs_sha256"])
def test_what_is_inside_the_memory_image_may_differ(name: str) -> None:
    refuse_mismatch(MADE, replace(MADE, **{name: "x" * 64}))


def test_a_record_of_an_older_version_does_not_say_its_machine() -> None:
    refuse_mismatch(replace(MADE, machine_type=""), MADE)


def test_every_field_is_decided_about() -> None:
    decided = {"driver", "accelerator", "cpu_model", "vmm_version", "tsc_khz", "machine_type", "kernel_sha256", "initramfs_sha256"}
    assert {field.name for field in fields(VmIdentity)} == decided


def test_all_differences_are_told_at_once() -> None:
    found = differences(MADE, replace(MADE, vmm_version="9", cpu_model="host", tsc_khz=1))
    assert len(found) == 3
