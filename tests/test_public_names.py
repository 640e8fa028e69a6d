"""The public names of the package: complete, sorted, and cheap to import."""

from __future__ import annotations

import subprocess
import sys

import headstart


def test_every_public_name_can_be_imported() -> None:
    for name in headstart.__all__:
        assert getattr(headstart, name) is not None


def test_public_names_are_sorted_and_have_a_home() -> None:
    assert headstart.__all__ == sorted(headstart.__all__)
    assert set(headstart.__all__) == set(headstart._HOMES) | {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(headstart, "no_such_name")


def test_importing_the_package_and_its_command_line_does_not_import_torch() -> None:
    code = (
        "import sys, headstart, headstart.cli.main, headstart.cli.inspect, headstart.cli.export\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
