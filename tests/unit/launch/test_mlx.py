"""mlx-vlm's server: with a drafter folder, or with a head that it finds in the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.launch_examples import command, report

from headstart.errors import LaunchError
from headstart.launch import LaunchOptions, build


def test_a_drafter_folder_is_given_with_a_block_of_one_more() -> None:
    words = command("mlx", head=Path("/heads/h"), speculate=2).argv
    assert words[:5] == ("python", "-m", "mlx_vlm.server", "--model", "/models/a model")
    at = words.index("--draft-model")
    assert words[at : at + 6] == (
        "--draft-model", "/heads/h", "--draft-kind", "mtp", "--draft-block-size", "3",
    )  # fmt: skip


def test_a_head_inside_the_model_is_the_models_path() -> None:
    words = command("mlx").argv
    assert words[words.index("--draft-model") + 1] == "/models/a model"


@pytest.mark.parametrize(
    "changes", [{"root": "language_model."}, {"outside": ("mtp/weights.safetensors",)}]
)
def test_a_head_where_it_does_not_look_needs_a_drafter(changes: dict[str, object]) -> None:
    found = report("qwen3_5", format="mlx")
    found = replace(found, head=replace(found.head, **changes))
    with pytest.raises(LaunchError, match=r"where mlx-vlm does not look.*--format mlx"):
        build("mlx", found, LaunchOptions(), "0.7.10")


def test_models_of_other_kinds_are_sent_elsewhere() -> None:
    with pytest.raises(LaunchError, match=r"is not converted to MLX\. Convert it with"):
        command("mlx", r_format=None)
    with pytest.raises(LaunchError, match="which runs on MLX: --engine mlx"):
        command("vllm", "qwen3_5", r_format="mlx")
    with pytest.raises(LaunchError, match="mlx-vlm does not serve the head of DeepSeek"):
        command("mlx", "deepseek_v3")
