"""`halocline bench slurm`: says what is missing, reads Slurm's answers, and calls only an equal curve recovered."""

import subprocess

import pytest
from typer.testing import CliRunner

from benchmarks import slurm_cluster
from benchmarks.slurm import CASES, SlurmCase, _judge
from benchmarks.slurm_cluster import SlurmCluster, SlurmError, facts_of, missing
from halocline.cli.app import app


def test_it_names_the_programs_that_are_missing(monkeypatch):
    monkeypatch.setattr(slurm_cluster.shutil, "which", lambda name, path=None: None if name == "slurmd" else name)
    assert missing() == ["slurmd"]
    told = CliRunner().invoke(app, ["bench", "slurm"])
    assert told.exit_code == 2
    assert "no slurmd here; `apt-get install -y slurm-wlm munge` has them" in " ".join(told.output.split())


def test_a_case_that_is_not_known_is_refused():
    told = CliRunner().invoke(app, ["bench", "slurm", "--case", "flood"])
    assert told.exit_code == 2 and "node down" in told.output


def test_the_facts_of_a_job_are_read():
    text = "JobId=7 JobName=run Restarts=1 JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n[0,2] Comment=a=b odd\n"
    facts = facts_of(text)
    assert facts["JobState"] == "RUNNING" and facts["NodeList"] == "n[0,2]" and facts["Comment"] == "a=b"


@pytest.mark.parametrize(
    ("requeued", "losses", "detail", "outcome"),
    [
        (1, [1.0, 0.5], "", "recovered"),
        (0, [1.0, 0.5], "", "lost"),
        (2, [1.0, 0.5], "", "lost"),
        (1, [1.0, 0.5000000000000001], "", "different"),
        (1, [1.0], "", "different"),
        (1, [1.0, 0.5], "FAILED, exit status 2:0", "failed"),
    ],
)
def test_only_one_requeue_and_the_same_bits_count_as_recovered(requeued, losses, detail, outcome):
    case = SlurmCase("SIGTERM", requeued=requeued, detail=detail)
    _judge(case, losses, [1.0, 0.5])
    assert case.outcome == outcome and bool(case.detail) == (outcome != "recovered")


def test_a_daemon_that_ends_is_an_error_and_leaves_nothing(monkeypatch, tmp_path):
    started = []

    def popen(command, **options):
        started.append(subprocess_popen(["/bin/false"], **options))
        return started[-1]

    subprocess_popen = subprocess.Popen
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(slurm_cluster.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(slurm_cluster, "missing", list)
    monkeypatch.setattr(slurm_cluster.subprocess, "Popen", popen)
    monkeypatch.setattr(SlurmCluster, "command", lambda self, *words: "")
    with pytest.raises(SlurmError, match="munged opens no socket"), SlurmCluster():
        pass
    assert [each.returncode for each in started] == [1] and not any(tmp_path.iterdir())


def test_there_is_a_case_for_each_way_in_which_a_job_loses_its_nodes():
    assert list(CASES) == ["SIGTERM", "SIGUSR1", "time limit", "scontrol requeue", "node down", "node dies"]
