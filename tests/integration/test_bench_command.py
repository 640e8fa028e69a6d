"""`headstart bench` as people run it: against scripted servers, and on a model of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.bench_server import Script, serving
from support.copying_runs import take_all_copies
from support.server_runs import served
from support.server_threads import serving as serving_engine
from support.server_threads import small_engine
from support.tiny_fixture import Tiny
from typer.testing import CliRunner

from headstart.bench.facts import facts_of_folder
from headstart.checkpoint.hub import named_models
from headstart.cli.main import app
from headstart.errors import ConfigError, ServerError

LOAD = ("--num-requests", "6", "--input-tokens", "5", "--output-tokens", "7", "--repeats", "2",
        "--warm-up", "0")  # fmt: skip
# Long beside what a busy machine adds; benchmarks/bench_accuracy.py is the one that is strict.
SLOW: dict[str, Any] = {"first_seconds": 0.04, "gap_seconds": 0.02}


def bench(*words: str) -> str:
    """What the command prints; its error is raised."""
    result = CliRunner().invoke(app, ["bench", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def questions(path: Path, *, category: str = "math", number: int = 2) -> str:
    lines = [
        {"question_id": i, "category": category, "turns": [f"{category} {i}?", "Why?"]}
        for i in range(number)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_two_servers_are_compared_and_the_result_can_be_held_against_another(
    tmp_path: Path,
) -> None:
    plain, drafting = Script(**SLOW), Script(**SLOW, tokens_per_chunk=(3,))
    with serving(plain) as one, serving(drafting) as other:
        urls = ("--url", f"plain={one.url}", "--url", f"K=2={other.url}")
        text = bench(
            "run", *urls, *LOAD, "--sweep", "concurrency=2,6", "--price", "on-demand=2,spot=1",
            "--goodput", "tpot:14", "--out", str(tmp_path / "first"),
        )  # fmt: skip
        plain.gap_seconds *= 2  # the plain server gets slower, the drafting one does not
        printed = bench("run", *urls, *LOAD, "--concurrency", "6", "--json")
    document = json.loads((tmp_path / "first" / "bench.json").read_text())
    # 40 ms to the first token, then 6 chunks of one token or 2 of three, 20 ms apart.
    truth = (0.04 + 6 * 0.02) / (0.04 + 2 * 0.02)
    for comparison in document["comparisons"]:
        assert comparison["variant"] == "K=2" and comparison["base"] == "plain"
        assert comparison["speed_up"]["value"] == pytest.approx(truth, rel=0.25)
        assert comparison["speed_up"]["low"] > 1.2
        assert comparison["savings"]["spot"] == pytest.approx(
            1 - 1 / comparison["speed_up"]["value"], rel=0.01
        )
        assert comparison["answers"]["equal"] == comparison["answers"]["compared"] == 12
    good = {cell["variant"]: cell["measures"]["good_requests_per_second"]
            for cell in document["cells"]}  # fmt: skip
    assert good["plain"] == 0 and good["K=2"] > 0
    assert "mean TPOT" in text and ("use K=2" in text) == document["is_valid"]
    page = (tmp_path / "first" / "report.html").read_text()
    assert "Output throughput" in page and "Cost of a million output tokens" in page
    _check_diff(tmp_path, json.loads(printed))


def _check_diff(tmp_path: Path, later: dict[str, Any]) -> None:
    """What got slower is worse, and only that; a result has not changed from itself."""
    first, second = str(tmp_path / "first"), str(tmp_path / "later.json")
    (tmp_path / "later.json").write_text(json.dumps(later))
    found = json.loads(bench("diff", first, second, "--json"))
    assert {cell["concurrency"] for cell in found["cells"]} == {6} and found["paired"]
    assert [cell["concurrency"] for cell in found["only_in_first"]] == [2, 2]
    by_name = {cell["variant"]: cell["figures"] for cell in found["cells"]}
    tpot = by_name["plain"]["tpot_seconds"]
    assert tpot["verdict"] == "worse" and tpot["sure"]
    assert tpot["ratio"]["value"] == pytest.approx(2.0, rel=0.3)
    assert by_name["plain"]["output_tokens_per_second"]["verdict"] == "worse"
    assert by_name["K=2"]["tpot_seconds"]["ratio"]["value"] == pytest.approx(1.0, rel=0.3)
    shown = bench("diff", first, second)
    assert "of 6 figures changed beyond noise, of which about 0.3 would by chance alone; " in shown
    assert _status("diff", first, second, "--fail-on-worse") == 1
    back = json.loads(bench("diff", second, first, "--json"))
    by_name = {cell["variant"]: cell["figures"] for cell in back["cells"]}
    assert by_name["plain"]["tpot_seconds"]["verdict"] == "better"
    assert "\n0 of 12 figures changed" in bench("diff", first, first, "--fail-on-worse")


def _status(*words: str) -> int:
    return CliRunner().invoke(app, ["bench", *words]).exit_code


def test_tasks_give_a_speed_up_each_and_save_what_was_answered(tmp_path: Path) -> None:
    files = [questions(tmp_path / f"{name}.jsonl", category=name) for name in ("math", "code")]
    mine, other = (
        Script(**SLOW, says="usage"),
        Script(**SLOW, tokens_per_chunk=(2,), says="usage", word="else "),
    )
    with serving(mine) as one, serving(other) as two:
        text = bench(
            "tasks", "--url", f"plain={one.url}", "--url", f"K=1={two.url}",
            "--question-file", files[0], "--question-file", files[1], "--max-gen-length", "5",
            "--num-questions", "1", "--answer-file", str(tmp_path / "answers"),
            "--result-file", str(tmp_path / "result"), "--out", str(tmp_path / "out"),
        )  # fmt: skip
    document = json.loads((tmp_path / "result").read_text())
    ups = {row["task"]: row["speed_up"]["value"] for row in document["tasks"] if row["speed_up"]}
    truth = pytest.approx((0.04 + 4 * 0.02) / (0.04 + 2 * 0.02), rel=0.25)
    assert ups == {"math": truth, "code": truth}
    answers = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    assert [(a["task"], a["variant"], len(a["turns"])) for a in answers] == [
        ("math", "plain", 2), ("math", "K=1", 2), ("code", "plain", 2), ("code", "K=1", 2),
    ]  # fmt: skip
    # The control of every check for equal answers: this server writes something else.
    assert "1 of 1 greedy answers differ from those of plain" in text
    assert "Speed-up by task" in (tmp_path / "out" / "report.html").read_text()


def test_what_was_measured_before_a_server_died_is_kept(tmp_path: Path) -> None:
    asked: list[str] = []

    def dies(prompt: str) -> str | None:
        asked.append(prompt)
        return "500" if len(asked) > 9 else None

    with serving(Script(fails=dies)) as server, pytest.raises(ServerError, match="warm-up"):
        bench(
            "run", "--url", server.url, "--sweep", "concurrency=1,2", "--num-requests", "6",
            "--input-tokens", "5", "--output-tokens", "3", "--repeats", "1",
            "--out", str(tmp_path / "out"),
        )  # fmt: skip
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [cell["concurrency"] for cell in document["cells"]] == [1]
    assert document["notes"][0].startswith("stopped early")


@pytest.mark.usefixtures("quick_processes")
def test_a_model_is_served_measured_and_stopped(tiny: Tiny, tmp_path: Path) -> None:
    text = bench(
        "run", str(served(tiny)), "--sweep", "concurrency=1,3", "k=0,3", "--num-requests", "4",
        "--input-tokens", "12", "--output-tokens", "24", "--repeats", "1", "--dtype", "float32",
        "--server-flags=--threads 1", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert "made up" in text
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert len(document["cells"]) == 4 and len(document["comparisons"]) == 2
    for cell in document["cells"]:
        measures, counted = cell["measures"], cell["speculation"]
        assert measures["num_answered"] == 4 and measures["output_tokens"] == 4 * 24
        drafted = 0 if cell["variant"] == "K=0" else counted["accepted_tokens"]
        assert counted["draft_tokens"] >= drafted >= (cell["variant"] == "K=3")
        # An answer's last rounds draft less: only what our server says of tries makes these known.
        rates = counted["conditional_acceptance"]
        assert len(rates) == (3 if cell["variant"] == "K=3" else 0)
        assert all(rate is not None and 0 <= rate <= 1 for rate in rates)
    for comparison in document["comparisons"]:
        assert comparison["answers"]["equal"] == 4  # float32: drafts change nothing


@pytest.mark.usefixtures("no_clock")
def test_drafts_of_the_head_are_compared_with_copied_ones(tiny: Tiny, tmp_path: Path) -> None:
    """Of one server, which copies from the answers that it gave the variant before."""
    engine = small_engine(served(tiny), speculate="auto", draft_from_answers=8)
    take_all_copies(engine)
    with serving_engine(engine) as server:
        bench(
            "run", "--url", server.url, "--compare", "auto+draft-from=head,auto+draft-from=context",
            "--num-requests", "4", "--input-tokens", "12", "--output-tokens", "24", "--repeats",
            "1", "--warm-up", "0", "--concurrency", "2", "--out", str(tmp_path / "out"),
        )  # fmt: skip
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    found = {cell["variant"]: cell["speculation"] for cell in document["cells"]}
    by_head, by_context = (found[f"auto draft-from={name}"] for name in ("head", "context"))
    assert by_head["copied_tokens"] == 0 < by_head["accepted_tokens"]
    assert by_context["copied_tokens"] == by_context["accepted_tokens"] > 20
    assert by_context["copied_share"] == 1
    assert "of drafts copied" in (tmp_path / "out" / "report.html").read_text()
    (comparison,) = document["comparisons"]
    assert comparison["answers"]["equal"] == 4


def test_a_model_without_a_chat_template_is_known_before_it_is_served(tiny: Tiny) -> None:
    folder = tiny("mimo")
    with pytest.raises(ConfigError, match="no chat template, which --api chat needs"):
        bench("run", str(folder), "--api", "chat", *LOAD)
    facts = facts_of_folder(folder, None)
    assert facts.api == "completions" and "has no chat template" in facts.notes[0]
    assert facts_of_folder(served(tiny), None).api == "chat"


def test_a_server_that_does_not_chat_is_asked_to_complete() -> None:
    words = "The model has no chat template."
    with serving(Script(refuses_chat=words)) as server:
        found = json.loads(bench("run", "--url", server.url, *LOAD, "--json"))
        assert found["workload"]["api"] == "completions"
        assert any("says: The model has no chat template; so" in note for note in found["notes"])
        with pytest.raises(ServerError, match=r"status 400: The model has no chat template\. See"):
            bench("run", "--url", server.url, "--api", "chat", *LOAD)


def test_the_key_comes_from_the_variable_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Script(key="secret")) as server:
        words = ("run", "--url", server.url, *LOAD, "--api-key-env", "BENCH_KEY")
        with pytest.raises(ConfigError, match="no such variable"):
            bench(*words)
        monkeypatch.setenv("BENCH_KEY", "wrong")
        with pytest.raises(ServerError, match=r"status 401: Give a key\. Put"):
            bench(*words)
        monkeypatch.setenv("BENCH_KEY", "secret")
        assert "12/12" in bench(*words)


def test_made_up_prompts_are_of_words_that_the_server_knows() -> None:
    own = ("unknown", *(f"t{i}" for i in range(60)))
    with serving(Script(vocabulary=own)) as server:
        text = bench("run", "--url", server.url, *LOAD)
        prompts = [body["messages"][0]["content"] for body in server.asked[2:]]
        assert all(set(prompt.split()) <= set(own) for prompt in prompts)
        assert len(set(prompts)) >= 6 and "--tokenizer FOLDER makes them exact" in text
        server.script.vocabulary = ()
        assert "--tokenizer FOLDER helps" in bench("run", "--url", server.url, *LOAD)


def test_a_server_that_takes_no_notice_of_drafts_is_not_compared_by_them() -> None:
    with serving(Script()) as server, pytest.raises(ConfigError, match="only Headstart's server"):
        bench("run", "--url", server.url, "--compare", "0,3", *LOAD)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run",), "neither a MODEL nor --url"),
        (("run", "a", "b"), "2 models given"),
        (("run", "a", "k=1"), "put --sweep before it"),
        (("run", "a", "--compare", "3", "--sweep", "k=0"), "both given"),
        (("run", "--url", "http://x:1", "--url", "http://y:1", "--compare", "0,1"), "2 --url"),
        (("run", "--url", "http://x:1", "--compare", "0,1+chunked-prefill=off"), "started so"),
        (("run", "a", "--repeats", "0"), "--repeats is 0"),
        (("run", "a", "--api-key-env", "X"), "for --url only"),
        (("run", "--url", "http://x:1", "--tokenizer", "nowhere"), "no tokenizer.json"),
        (("run", "--url", "http://x:1", "--server-flags", "--threads 1"), "for a MODEL only"),
        (("run", "--url", "http://x:1", "--device", "cpu"), "--device and --url were both given"),
        (("tasks", "--url", "http://x:1", "--question-file", "q", "--dtype", "float32"), "--dtype"),
        (("run", "--url", "http://x:1", "--spacing", "poisson"), "--spacing is poisson without a"),
        (("run", "--url", "http://x:1", "--shuffle"), "shuffle is set without a file"),
        (("run", "--url", "http://x:1", "--gpus", "1"), "--gpus is 1 without a price"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_together_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench(*words)


def test_a_dry_run_says_what_would_be_measured(tmp_path: Path) -> None:
    text = bench(
        "run", "--url", "http://nowhere:1", "--sweep", "concurrency=1,2 k=0,3", "--dry-run", *LOAD
    )
    assert "K=0 (base), K=3" in text and "6 in each of 8 runs" in text


def test_a_dry_run_tells_machines_which_server_would_be_started(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo by its name; its weights may not be installed here."""
    monkeypatch.setitem(named_models, "demo", lambda: served(tiny))
    plan = json.loads(bench("run", "demo", "--dry-run", "--json", *LOAD))
    assert plan["plans"][0]["variants"] == ["K=0", "K=3"] and plan["dry_run"] is True
    usual = (
        "headstart serve demo --speculate 3 --no-prefix-caching --max-running-requests 64 "
        "--max-queue 64 --device auto --dtype auto --weights int8"
    )
    assert plan["servers"] == [usual]
    keyed = ("--server-flags", "--api-key hush --threads 1 --api-key=hush")
    shown = bench("run", "demo", "--dry-run", *keyed, *LOAD)
    assert f"{usual} --api-key ... --threads 1 --api-key=..." in shown and "hush" not in shown
    with pytest.raises(ConfigError, match="--server-flags cannot be read"):
        bench("run", "demo", "--dry-run", "--server-flags", "--x 'y", *LOAD)


def test_an_existing_result_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(Exception, match="exists"):
        bench("run", "--url", "http://nowhere:1", "--out", str(tmp_path / "out"))
