"""DSpark and DFlash drafters are told from MTP heads, named with their engines, and left alone."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from support.head_edits import Tensors, convert, edited, export, graft, head_names, restore, stitch
from support.tiny_fixture import Tiny
from torch import zeros

from headstart.checkpoint.config import Config
from headstart.checkpoint.header import TensorInfo
from headstart.checkpoint.index import Index
from headstart.checkpoint.reader import Checkpoint
from headstart.cli.inspect_view import show
from headstart.errors import HeadNotFound, HeadstartError, LaunchError
from headstart.heads.drafters import find_drafter
from headstart.heads.inspection import inspect
from headstart.launch import LaunchOptions, build, commands_for
from headstart.launch.versions import NEWEST

V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 43, "num_nextn_predict_layers": 1}


def checkpoint(config: dict[str, Any], *names: str) -> Checkpoint:
    tensors = {n: TensorInfo(n, "BF16", (), Path("nowhere"), 0, 2) for n in names}
    return Checkpoint(Path("nowhere"), Config(config), Index(tensors, {}, False, (), {}, {}))


@pytest.mark.parametrize(
    ("config", "names", "kind"),
    [
        ({**V4, "dspark_block_size": 4}, ("mtp.0.attn.wkv.weight",), "DSpark"),
        (V4, ("mtp.0.enorm.weight", "mtp.0.main_proj.weight"), "DSpark"),
        (V4, ("mtp.2.markov_head.markov_w1.weight",), "DSpark"),
        (V4, ("mtp.0.confidence_head.proj.weight",), "DSpark"),
        ({"model_type": "mistral_large4"}, ("mtp_dspark.layers.0.x.weight",), "DSpark"),
        ({"model_type": "deepseek_v41"}, (), "DSpark"),
        ({"model_type": "k3_dspark"}, (), "DSpark"),
        ({"architectures": ["Qwen3DSparkModel"]}, (), "DSpark"),
        ({"model_type": "muse_glimmer_assistant"}, (), "DFlash"),
        ({"architectures": ["DFlashDraftModel"]}, (), "DFlash"),
        ({"speculators_model_type": "dflash"}, (), "DFlash"),
        ({"model_type": "qwen3", "dflash_config": {}}, (), "DFlash"),
    ],
)
def test_a_drafter_is_told_by_its_config_or_its_tensors(
    config: dict[str, Any], names: tuple[str, ...], kind: str
) -> None:
    found = find_drafter(checkpoint(config, "lm_head.weight", *names))
    assert found is not None and found.kind.name == kind
    assert len(found.tensors) == len(names)
    with pytest.raises(HeadNotFound, match=rf"a {kind} drafter .* no MTP head.*served by vLLM"):
        from headstart.heads.detection import require_family

        require_family(checkpoint(config, *names))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (V4, ("mtp.0.e_proj.weight", "mtp.0.h_proj.weight")),
        ({**V4, "dspark_block_size": None}, ("mtp.0.e_proj.weight",)),
        ({"model_type": "qwen3_5"}, ("mtp.fc.weight", "mtp.norm.weight")),
        ({"model_type": "x"}, ("model.layers.3.main_proj.weight",)),
    ],
)
def test_a_head_is_not_taken_for_a_drafter(config: dict[str, Any], names: tuple[str, ...]) -> None:
    assert find_drafter(checkpoint(config, *names)) is None


@pytest.fixture(scope="module")
def dspark(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V4 as released again: three stages below `mtp.`, and a count of one."""

    def change(contents: Tensors) -> None:
        for name in head_names(tiny("deepseek_v4")).values():
            if any(part in name for part in ("enorm", "hnorm", "e_proj", "h_proj", "hc_head")):
                del contents[name]
        contents["mtp.0.main_proj.weight"] = zeros(4, 12)
        for stage in (1, 2):
            contents[f"mtp.{stage}.attn.wkv.weight"] = zeros(4, 4)

    return edited(tiny("deepseek_v4"), tmp_path_factory.mktemp("v4") / "dspark", change=change)


def test_inspect_names_the_drafter_and_its_flags(
    dspark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = inspect(Checkpoint.open(dspark))
    assert (report.head.state, report.head.tensors) == ("absent", 0)
    document = report.as_json()["drafter"]
    assert (document["kind"], document["stages"]) == ("DSpark", 3)
    assert document["bytes"] > 0 and '"method": "dspark"' in document["engines"]["vllm"]["flags"]
    assert str(dspark) not in str(document["engines"]), "the drafter has no folder of its own"
    assert not any("restore" in warning for warning in report.warnings)
    show(report, commands_for(report))
    printed = " ".join(capsys.readouterr().out.split())
    assert "drafter DSpark, 3 stages" in printed
    assert "--speculative-algorithm DSPARK" in printed


def test_no_operation_takes_the_drafter_for_a_head(
    dspark: Path, tiny: Tiny, tmp_path: Path
) -> None:
    whole, bare = tiny("deepseek_v4"), tiny("deepseek_v4", with_head=False)
    out = tmp_path / "out"
    refused = [
        lambda: export(dspark, "headstart", out),
        lambda: convert(dspark, "sglang", out),
        lambda: graft(dspark, out),
        lambda: stitch(dspark, bare, out),
        lambda: stitch(whole, dspark, out),
        lambda: restore(dspark, whole, out),
    ]
    for operation in refused:
        with pytest.raises(HeadNotFound, match="DSpark"):
            operation()
    assert not out.exists()


@pytest.mark.parametrize("engine", [name for name in NEWEST if name not in ("llamacpp", "mlx")])
def test_launch_says_how_the_engine_serves_it(dspark: Path, engine: str) -> None:
    report = inspect(Checkpoint.open(dspark))
    own = {"vllm": "0.25.0 .* or later serves it with --speculative-config", "sglang": "DSPARK"}
    with pytest.raises(LaunchError, match=own.get(engine, "does not serve DSpark")):
        build(engine, report, LaunchOptions(), NEWEST[engine])
    assert build(engine, report, LaunchOptions(speculate=0), NEWEST[engine])


def test_a_drafter_of_its_own_is_no_head_to_launch_or_convert(tiny: Tiny, tmp_path: Path) -> None:
    """Kimi-K3's drafts are by others, in folders of their own, as Muse Glimmer's assistant is."""
    for kind, name in (("k3_dspark", "DSpark"), ("muse_glimmer_assistant", "DFlash")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "block_size": 16}))
        save_file({"layers.0.fc.weight": zeros(4, 4)}, folder / "model.safetensors")
        report = inspect(Checkpoint.open(folder))
        assert any(f"is a {name} drafter" in text for text in report.warnings)
        assert report.drafter is not None and not report.drafter.is_inside
        for flags in report.drafter.flags.values():
            assert str(folder) in flags, "an engine would look for the drafter inside the model"
        assert '"num_speculative_tokens": 16' in report.drafter.flags["vllm"]
        with pytest.raises(HeadstartError, match=f"is a {name} drafter"):
            convert(folder, "headstart", tmp_path / "out")
        options = LaunchOptions(head=folder)
        with pytest.raises(LaunchError, match=f"--head: .* is a {name} drafter"):
            build("vllm", inspect(Checkpoint.open(tiny("deepseek_v4"))), options, NEWEST["vllm"])


def test_flags_can_be_pasted_whatever_the_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "my $(id) 'dir'"
    folder.mkdir()
    config = {"model_type": "muse_glimmer_assistant", "block_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"layers.0.fc.weight": zeros(4, 4)}, folder / "model.safetensors")
    found = find_drafter(Checkpoint.open(folder))
    assert found is not None
    option, value = shlex.split(found.flags["vllm"])
    assert option == "--speculative-config"
    assert json.loads(value) == {
        "method": "dflash", "model": str(folder), "num_speculative_tokens": 16,
    }  # fmt: skip
    assert shlex.split(found.flags["sglang"])[-1] == str(folder)
