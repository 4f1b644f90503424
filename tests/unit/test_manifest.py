"""What is recorded is whole and unchanged; what is not is made again, or refused."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from mismatch.errors import MismatchError
from mismatch.run import manifest, resume, store
from mismatch.specs import RolloutSpec, TrainSpec, spec_hash

from ..made_run import make_run, rollout, scoring, spec


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_every_artefact_is_recorded_with_checksum_schema_and_inputs(run):
    entries = manifest.entries(run)
    files = {"rollout.parquet", "vocabulary.json"}
    files |= {"scores/transformers-decode.parquet", "scores/fsdp.parquet"}
    assert entries.keys() == files
    entry = entries["scores/fsdp.parquet"]
    assert entry["sha256"] == manifest.sha256(run / "scores" / "fsdp.parquet")
    assert entry["bytes"] == (run / "scores" / "fsdp.parquet").stat().st_size
    assert entry["schema"] == "mismatch.scoring/1"
    assert entry["made_by"] == spec_hash(spec().train)
    assert entry["inputs"] == {"rollout.parquet": entries["rollout.parquet"]["sha256"]}


def test_one_changed_byte_is_refused_with_the_file_and_the_fix(run):
    path = run / "scores" / "fsdp.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(MismatchError, match=r"fsdp\.parquet.*checksum") as caught:
        store.load_scoring(run, "fsdp")
    assert "--resume" in caught.value.fix


def test_what_the_manifest_does_not_list_is_refused(run):
    document = json.loads((run / "manifest.json").read_text())
    del document["artefacts"]["rollout.parquet"]
    (run / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(MismatchError, match=r"rollout\.parquet is not"):
        store.load_rollout(run)
    assert not resume.rollout_done(run, spec().rollout)  # it is made again
    (run / "manifest.json").unlink()  # files that were copied one by one
    assert store.load_rollout(run).n_sequences == 16


def test_a_stage_is_done_only_for_its_own_spec_and_rollout(run):
    wanted = spec()
    assert resume.rollout_done(run, wanted.rollout)
    assert resume.scoring_done(run, "fsdp", wanted.train)
    assert not resume.rollout_done(run, RolloutSpec())
    assert not resume.scoring_done(run, "fsdp", TrainSpec(dtype="fp32"))
    assert not resume.scoring_done(run, "fsdp:grad", wanted.train)
    store.save_rollout(run, rollout(seed=7), made_by=wanted.rollout)  # sampled again: other tokens
    assert not resume.scoring_done(run, "fsdp", wanted.train)
    assert not resume.rollout_done(run, wanted.rollout)  # its decode scoring is of the old tokens


def test_a_damaged_artefact_is_not_done(run):
    (run / "scores" / "fsdp.parquet").write_bytes(b"PAR1")
    assert not resume.scoring_done(run, "fsdp", spec().train)
    (run / "vocabulary.json").unlink()
    assert not resume.rollout_done(run, spec().rollout)


def test_a_manifest_of_another_version_is_refused(run):
    (run / "manifest.json").write_text(json.dumps({"schema": "mismatch.manifest/0"}))
    with pytest.raises(MismatchError, match=r"manifest\.json"):
        store.load_rollout(run)
    (run / "manifest.json").write_text('{"schema": "mismatch.manifest/9", "artefacts": {}}')
    with pytest.raises(MismatchError, match=r"mismatch\.manifest/9"):
        store.load_rollout(run)


def test_an_engine_and_a_trainer_may_record_at_once(tmp_path):
    code = """
        import sys
        from pathlib import Path
        from mismatch.run import store
        for number in range(20):
            store.save_document(Path.cwd(), f"{sys.argv[1]}{number}.json", number, schema="x")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    writers = [subprocess.Popen([*command, name], cwd=tmp_path) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert len(manifest.entries(tmp_path)) == 40


def test_two_writers_of_one_file_do_not_remove_what_the_other_has_just_finished(tmp_path):
    """As two `mismatch report` of one run, or ranks that leave one step."""
    code = """
        from pathlib import Path
        from mismatch.run.manifest import write_atomic
        for number in range(300):
            write_atomic(Path.cwd() / "report.html", lambda file: file.write(b"x" * 100))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    writers = [subprocess.Popen(command, cwd=tmp_path) for _ in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {root!r})
    from tests import made_run
    from mismatch.run import store
    replace = os.replace
    def killing(source, target):
        {before}
        replace(source, target)
        {after}
    run = Path({run!r})
    made = made_run.rollout()
    os.replace = killing
    store.save_scoring(run, made_run.scoring("fsdp", made, 0.5), made, made_run.spec().train)
"""
DIE = "if str(target).endswith('fsdp.parquet'): os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_inside_a_write_leaves_the_old_artefact_or_one_to_make_again(run, moment):
    """Before the rename the old file stands; after it, before the record, it counts as not made."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    lines = {"before": "pass", "after": "pass"} | {moment: DIE}
    code = textwrap.dedent(KILLED).format(root=root, run=str(run), **lines)
    old = store.load_scoring(run, "fsdp").logprobs
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL
    if moment == "before":
        assert (store.load_scoring(run, "fsdp").logprobs == old).all()
        assert resume.scoring_done(run, "fsdp", spec().train)
    else:
        assert not resume.scoring_done(run, "fsdp", spec().train)
        with pytest.raises(MismatchError, match=r"truncated|checksum"):
            store.load_scoring(run, "fsdp")
    samples = rollout()
    again = scoring("fsdp", samples, 0.5)
    store.save_scoring(run, again, samples, made_by=spec().train)
    assert (store.load_scoring(run, "fsdp").logprobs == again.logprobs).all()
