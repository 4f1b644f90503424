"""The section that every report has."""

import pytest

from mismatch.features.corrections import section as corrections
from mismatch.pipeline.build import build_report
from mismatch.pipeline.document import report_to_json
from mismatch.run.directory import load_spec
from tests.fixes_fixture import make_table
from tests.made_run import make_run
from tests.reports_fixture import make_failing_report, make_report
from tests.tables import values

FAVOURED, _ = make_failing_report()
NEEDLESS = make_report()


def section(report):
    return corrections.section(report.result("corrections"), report)


def test_the_table_has_the_preview_best_first():
    preview = FAVOURED.result("corrections").named("tis-token")
    first, *_, last = values(section(FAVOURED).tables[0])
    assert (first["name"], first["rank"], first["kept"]) == ("tis-token", "1", preview.kept_tokens)
    assert (first["error"], first["residual bias"]) == (preview.token.error, preview.token.bias)
    assert (last["name"], last["rank"]) == ("override", None)
    assert section(FAVOURED).tables[0].cells()[0][0].tone == "strong"
    assert "" in {cell.tone for (cell, *_) in section(FAVOURED).tables[0].cells()}


def test_every_framework_gets_its_setting():
    blocks = {block.title.split(":")[0]: block.lines for block in section(FAVOURED).parts[1].blocks}
    assert list(blocks) == ["verl", "TRL", "NeMo-RL", "prime-rl"]
    assert "    rollout_is_threshold: 2" in blocks["verl"]


def test_what_was_asked_for_as_a_fix_is_marked():
    tried = FAVOURED.with_analyses(fixes=make_table())
    notes = [row[1].note for row in section(tried).tables[0].cells()]
    assert any("--fix tis" in note for note in notes)
    assert not any(row[1].note for row in section(FAVOURED).tables[0].cells())


def test_the_preview_touches_neither_metrics_nor_verdict():
    document = report_to_json(FAVOURED)
    bare = report_to_json(FAVOURED.with_analyses(corrections=None))
    section = document.pop("corrections")
    assert document == bare
    assert not {"k3_kl", "verdict", "status"} & set(section["previews"][0])


def test_a_run_is_previewed(tmp_path):
    run = make_run(tmp_path / "run")
    report, _ = build_report(run, load_spec(run))
    table = report.result("corrections")
    assert (table.rollout, table.train, table.batch) == ("transformers:decode", "fsdp", 16)
    assert table.named("tis-token").weight_mean == pytest.approx(1.01005, abs=1e-5)
