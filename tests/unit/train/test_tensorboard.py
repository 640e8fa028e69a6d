"""Tags of TensorBoard: no spaces, depths from 1, validations with their categories."""

from __future__ import annotations

from headstart.train.tensorboard import scalars


def test_tags_have_no_spaces_and_name_depths_and_categories() -> None:
    step = {"step": 3, "loss": 2.0, "loss_by_depth": [2.5, 1.5], "learning_rate": 1e-4}
    assert dict(scalars(step)) == {
        "loss": 2.0, "loss/depth_1": 2.5, "loss/depth_2": 1.5, "learning_rate": 1e-4,
    }  # fmt: skip
    part = {"acceptance_length": 1.5, "cumulative_acceptance": [0.4, 0.1]}
    found = dict(scalars({"step": 3, "validation": {**part, "by_category": {"long talk": part}}}))
    assert found == {
        "validation/acceptance_length": 1.5,
        "validation/cumulative_acceptance/depth_1": 0.4,
        "validation/cumulative_acceptance/depth_2": 0.1,
        "validation/by_category/long_talk/acceptance_length": 1.5,
        "validation/by_category/long_talk/cumulative_acceptance/depth_1": 0.4,
        "validation/by_category/long_talk/cumulative_acceptance/depth_2": 0.1,
    }
