"""Trackers get settings, losses and metrics of a run; each against the installed package, offline."""

import json

import pytest

from halocline.train.config import make_settings
from halocline.train.log import read_log
from halocline.train.trainer import Trainer


def trained(folder, *callbacks, steps=3):
    settings = make_settings(
        {
            "workload": "unet3d",
            "network": {"width": 1},
            "data": {"samples": 2, "validation": 1, "arguments": {"size": 16}},
            "steps": steps,
            "batch": 1,
            "callbacks": [f"halocline.integrations:{name}" for name in callbacks],
        }
    )
    return Trainer(settings, folder, lambda kind, values: None).train()


def records(data):
    """The records of a file in the log format of LevelDB, behind a header of seven bytes: blocks of 32 KiB, in which
    each piece has a checksum, a length and a kind (whole, first, middle, last)."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        rest = 32768 - place % 32768
        if rest < 7:
            place += rest
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.integration
def test_wandb_offline(tmp_path, monkeypatch, package):
    wandb = package("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    trained(tmp_path / "run", "WandB")
    wandb.teardown()  # as at the end of a process: its service writes the rest of the file after the run has finished
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    losses, metrics, config = {}, {}, {}
    for data in records(written.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        losses |= {row["_step"]: row["loss"]} if "loss" in row else {}
        metrics |= {name: value for name, value in row.items() if name.startswith("validation/")}
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    logged = {entry["step"]: entry["loss"] for entry in read_log(tmp_path / "run", "step")}
    assert losses == logged
    assert "validation/mean_dice" in metrics and config["workload"] == "unet3d" and config["optimizer.lr"] > 0


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")  # MLflow's own use of SQLAlchemy
def test_mlflow_with_a_local_store(tmp_path, monkeypatch, package):
    mlflow = package("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    trained(tmp_path / "run", "MLflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    number = json.loads((tmp_path / "run" / "mlflow-id.json").read_text())["run"]
    losses = {each.step: each.value for each in client.get_metric_history(number, "loss")}
    assert losses == {entry["step"]: entry["loss"] for entry in read_log(tmp_path / "run", "step")}
    run = client.get_run(number)
    assert run.info.status == "FINISHED" and run.data.params["workload"] == "unet3d"
    assert "validation/mean_dice" in run.data.metrics
    trained(tmp_path / "run", "MLflow", steps=5)  # resumed: the same run goes on
    assert len(client.get_metric_history(number, "loss")) == 5
    assert len(client.search_runs([run.info.experiment_id])) == 1


@pytest.mark.integration
def test_tensorboard_has_the_losses_of_the_log(tmp_path, package):
    package("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path / "run")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    losses = [event.value for event in board.Scalars("step/loss")]
    assert losses == pytest.approx([entry["loss"] for entry in read_log(tmp_path / "run", "step")], rel=1e-6)
    assert "validation/mean_dice" in board.Tags()["scalars"]


def test_a_missing_tracker_says_how_to_get_it(monkeypatch):
    import sys

    from halocline.errors import ConfigError
    from halocline.integrations import WandB

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'halocline\[wandb\]'"):
        WandB()
