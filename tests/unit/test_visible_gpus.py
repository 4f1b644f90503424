"""Which GPUs there are: nvidia-smi and torch are played, CUDA_VISIBLE_DEVICES has all its forms."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mismatch.doctor.machine import inspect_machine
from mismatch.processes.launch import finish, started
from mismatch.run import machine
from mismatch.run.machine import free_gpu_bytes, local_gpus, visible_as, visible_cards

MIB = 1 << 20
# index, uuid, name, total, driver, MIG; an RTX 4090 beside an A100, in the order of the PCI bus.
A100 = "0, GPU-1111-aaaa, NVIDIA A100, SXM4, 81920, 580.1, Disabled"
RTX = "1, GPU-2222-bbbb, NVIDIA GeForce RTX 4090, 24564, 580.1, [N/A]"
L4 = "2, GPU-2233-cccc, NVIDIA L4, 23034, 580.1, [N/A]"
FREE = "GPU-1111-aaaa, 80000\\nGPU-2222-bbbb, 20000\\nGPU-2233-cccc, 9000"
Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Put scripts in the place of nvidia-smi and of the process that asks torch."""

    def write(*cards: str, script: str = "", torch: str = "", devices: str = "") -> None:
        listing = "\\n".join(cards)
        script = (
            script or f"case $1 in *index*) printf '{listing}\\n';; *) printf '{FREE}\\n';; esac"
        )
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho x >> {tmp_path / 'asked'}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(machine, "ASK_TORCH", torch)
        monkeypatch.setattr(machine, "DEVICES", (devices,) if devices else ())
        machine.cards.cache_clear()
        machine.cards_of_torch.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield write
    machine.cards.cache_clear()
    machine.cards_of_torch.cache_clear()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, "A100 RTX L4"),
        ("", ""),
        ("-1", ""),
        ("1", "RTX"),
        ("2, 0", "L4 A100"),
        ("0,-1,1", "A100"),
        ("0,7,1", "A100"),
        ("7", ""),
        ("0,,1", "A100"),
        ("0,0", ""),
        ("1gpu2", "RTX"),
        ("GPU-2222-bbbb", "RTX"),
        ("GPU-2222", "RTX"),
        ("GPU-22", ""),  # two begin so
        ("GPU-3", ""),
        ("GPU-2233,GPU-1111", "L4 A100"),
        ("GPU-2222,GPU-9,GPU-1111", "RTX"),
        ("GPU-2222,GPU-2222-bbbb", ""),
    ],
)
def test_forms_of_cuda_visible_devices(
    play: Play, monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str
) -> None:
    play(A100, RTX, L4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    kinds = [next(k for k in ("A100", "RTX", "L4") if k in card.model) for card in visible_cards()]
    assert kinds == seen.split()
    assert local_gpus() == len(kinds)


@pytest.mark.parametrize("visible", ["1", "2,0", "0,-1,1", "0,0", "1gpu2", "0,,1", "-1", " 1 , 0"])
def test_torch_reads_the_same_indices(
    play: Play, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    from torch.cuda import _parse_visible_devices

    play(A100, RTX, L4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [int(card.name) for card in visible_cards()] == _parse_visible_devices()


@pytest.mark.parametrize("visible", ["GPU-22", "GPU-2233,GPU-1", "GPU-2222,GPU-9,GPU-1111"])
def test_torch_reads_the_same_uuids(
    play: Play, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    from torch.cuda import _transform_uuid_to_ordinals

    play(A100, RTX, L4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    uuids = [card.uuid for card in machine.cards()]
    torchs = _transform_uuid_to_ordinals(visible.split(","), uuids)
    assert [card.uuid for card in visible_cards()] == [uuids[n] for n in torchs]


def test_memory_belongs_to_its_gpu_and_names_go_on_as_they_were_given(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(A100, RTX, L4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2222,GPU-1111")
    names = [RTX.split(", ")[2], ", ".join(A100.split(", ")[2:4])]
    assert [gpu.name for gpu in inspect_machine().gpus] == names
    assert [gpu.free_bytes for gpu in inspect_machine().gpus] == [20000 * MIB, 80000 * MIB]
    assert free_gpu_bytes() == [20000 * MIB, 80000 * MIB]
    assert visible_as((1,)) == {"CUDA_VISIBLE_DEVICES": "GPU-1111"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert visible_as((1,)) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_what_does_not_change_is_asked_once(play: Play, tmp_path: Path) -> None:
    play(A100, RTX)
    for _ in range(5):
        assert local_gpus() == 2
    assert len((tmp_path / "asked").read_text().split()) == 1


MIG = "print('0 MIG-7 20000 19000 NVIDIA H100 MIG 2g.20gb')"


def test_a_slice_of_a_gpu_has_its_own_memory(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    play("0, GPU-1, NVIDIA H100, 81559, 580.1, Enabled", torch=MIG)
    for visible in ("MIG-7", "0", None):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        (gpu,) = inspect_machine().gpus
        assert (gpu.memory_bytes, gpu.free_bytes) == (20000 * MIB, 19000 * MIB)
    assert free_gpu_bytes() == []


@pytest.mark.parametrize("script", ["exit 127", "exec sleep 60"])
def test_torch_is_asked_where_nvidia_smi_does_not_answer(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(machine, "SMI_S", 0.5)
    two = "print('0 a 81559 80000 NVIDIA H100'); print('1 b 81559 70000 NVIDIA H100')"
    (tmp_path / "nvidia0").touch()
    play(script=script, torch=two, devices=str(tmp_path / "nvidia*"))
    assert [gpu.free_bytes for gpu in inspect_machine().gpus] == [80000 * MIB, 70000 * MIB]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_gpus() == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    play(script=script, torch=two)  # no device of a driver: nothing is asked
    assert local_gpus() == 0


def test_children_count_gpus_as_nvidia_smi_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    code = (
        f"import os; open({str(tmp_path / 'order')!r}, 'w').write(os.environ['CUDA_DEVICE_ORDER'])"
    )
    with started("child", [sys.executable, "-c", code], tmp_path) as worker:
        finish(worker)
    assert (tmp_path / "order").read_text() == "PCI_BUS_ID"
