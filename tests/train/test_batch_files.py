"""Files for batch systems: what they say, and which options go together."""

import pytest
from typer.testing import CliRunner

from halocline.cli.app import app
from halocline.train.batch_files import BatchJob, kubernetes_manifest, slurm_script


def launch(*words):
    return CliRunner().invoke(app, ["launch", "run.toml", *words])


def test_slurm_gets_partition_account_and_environment():
    job = BatchJob("run.toml", "runs/a", variables={"NCCL_DEBUG": "WARN", "NOTE": "two words"})
    text = slurm_script(job, "gpu", "abc", ["constraint=a100", "--exclusive"], ["source env/bin/activate"])
    lines = text.splitlines()
    for line in (
        "#SBATCH --partition=gpu",
        "#SBATCH --account=abc",
        "#SBATCH --constraint=a100",
        "#SBATCH --exclusive",
    ):
        assert line in lines
    assert lines.index("source env/bin/activate") < lines.index("export NOTE='two words'")
    assert lines.index("export NOTE='two words'") < lines.index("srun halocline train run.toml --out runs/a")
    directives = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives == list(range(1, 1 + len(directives)))  # sbatch stops reading at the first other line


def test_a_plain_slurm_script_has_none_of_them():
    text = slurm_script(BatchJob("run.toml", "runs/a"))
    assert "partition" not in text and "account" not in text and "gpus" not in text


@pytest.mark.parametrize("nodes", [1, 3])
def test_the_kubernetes_manifest_is_a_pytorch_job(nodes):
    yaml = pytest.importorskip("yaml")
    job = BatchJob("/data/my run.toml", "/data/runs/a", nodes, 8, 8, 6, 2, {"NCCL_DEBUG": "WARN"})
    made = yaml.safe_load(kubernetes_manifest(job, "registry/halocline:1", "volumes"))
    assert (made["apiVersion"], made["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert made["metadata"]["name"] == "my-run"
    spec = made["spec"]
    assert spec["nprocPerNode"] == "8" and spec["runPolicy"]["activeDeadlineSeconds"] == 7200
    replicas = {kind: each["replicas"] for kind, each in spec["pytorchReplicaSpecs"].items()}
    assert replicas == ({"Master": 1, "Worker": 2} if nodes == 3 else {"Master": 1})
    for each in spec["pytorchReplicaSpecs"].values():
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"][-4:] == ["train", "/data/my run.toml", "--out", "/data/runs/a"]
        assert container["resources"]["limits"] == {"cpu": "48", "nvidia.com/gpu": 8}
        assert container["env"] == [{"name": "NCCL_DEBUG", "value": "WARN"}]
        mounts = {each["name"] for each in container["volumeMounts"]}
        assert mounts == {each["name"] for each in each["template"]["spec"]["volumes"]} == {"data", "shm"}


WRONG = [
    ([], "--slurm or --kubernetes"),
    (["--slurm", "--kubernetes"], "--slurm or --kubernetes"),
    (["--kubernetes"], "needs --image"),
    (["--kubernetes", "--image", "i", "--partition", "gpu"], "--partition: only --slurm"),
    (["--slurm", "--image", "i"], "--image: only --kubernetes"),
    (["--slurm", "--environment", "1A=2"], "give NAME=VALUE"),
    (["--slurm", "--environment", "A"], "give NAME=VALUE"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_options_that_do_not_go_together_are_named(words, message):
    found = launch(*words)
    assert found.exit_code == 2 and message in found.stderr and len(found.stderr.splitlines()) == 1


def test_the_command_writes_the_file(tmp_path):
    path = tmp_path / "run.sbatch"
    assert launch("--slurm", "--account", "abc", "--file", str(path)).exit_code == 0
    assert "#SBATCH --account=abc" in path.read_text()
