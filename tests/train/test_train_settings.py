"""Settings from TOML and the command line, with errors that name key, value and what is allowed; LARC; schedules."""

import math

import pytest
import torch
from torch import nn

from halocline.train.batch_files import BatchJob, slurm_script
from halocline.train.config import load_settings, make_settings, read_settings, write_settings
from halocline.train.optimizers import LARC, LARC_EPSILON, make_optimizer, rate_at
from halocline.train.settings import ConfigError, OptimizerSettings, ScheduleSettings
from halocline.train.task import spread


def test_what_is_written_is_read_again(tmp_path):
    told = {"workload": "unet3d", "data": "a.h5", "network": {"width": 8}, "mesh": {"D": 2}}
    settings = make_settings(told, ["optimizer.lr=1e-4", "optimizer.betas=[0.8, 0.9]", "precision=bf16", "clip=1.5"])
    assert settings.data.path == "a.h5" and settings.optimizer.lr == 1e-4 and settings.precision == "bf16"
    write_settings(settings, tmp_path / "config.toml")
    assert load_settings(tmp_path / "config.toml") == settings
    assert read_settings(tmp_path) == settings


@pytest.mark.parametrize(
    ("told", "changes", "text"),
    [
        ({"workload": "a", "optimiser": {"lr": 1}}, [], "optimiser is unknown; did you mean optimizer"),
        ({"workload": "a", "optimizer": {"lrr": 1}}, [], "optimizer.lrr is unknown; did you mean optimizer.lr"),
        ({"workload": "a", "optimizer": {"lr": "fast"}}, [], "optimizer.lr = 'fast': input should be a valid number"),
        ({"workload": "a"}, ["precision=fp8"], "precision = 'fp8'.*'fp64', 'fp32'"),
        ({"workload": "a"}, ["mesh.Q=2"], "mesh.Q is unknown: the key should be 'N', 'C', 'T', 'D', 'H' or 'W'"),
        ({"workload": "a"}, ["mesh.D=0"], "mesh.D = 0: input should be greater than or equal to 1"),
        ({"workload": "a", "steps": 0}, [], "steps = 0: input should be greater than or equal to 1"),
        ({"workload": "a", "steps": 1.5}, [], "steps = 1.5"),
        ({"workload": "a"}, ["steps"], "give key=value"),
        ({"workload": "a"}, ["optimizer.lr=0"], "optimizer.lr = 0.*greater than 0"),
        ({}, [], "give workload"),
        ({"model": "a:b"}, [], "needs loss"),
        ({"workload": "a", "model": "a:b"}, [], "not both"),
    ],
)
def test_mistakes_are_told(told, changes, text):
    with pytest.raises(ConfigError, match=text):
        make_settings(told, changes)


def test_a_file_that_is_no_toml_or_not_there(tmp_path):
    (tmp_path / "a.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"a\.toml is not valid TOML"):
        load_settings(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match=r"b\.toml cannot be read"):
        load_settings(tmp_path / "b.toml")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        read_settings(tmp_path)


@pytest.mark.parametrize("text", ["8 apples", "GiB", "-3"])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match=r"data\.memory"):
        make_settings({"workload": "unet3d"}, [f"data.memory='{text}'"])


def test_ranks_are_spread_over_dims():
    assert spread(8, "DHW") == {"D": 2, "H": 2, "W": 2}
    assert spread(6, "DH") == {"D": 3, "H": 2}
    assert spread(1, "DH") == {"D": 1}
    assert spread(4, "H") == {"H": 4}


def _model(mode, trust=0.002, lr=0.1):
    model = nn.Linear(4, 4).double()
    return model, LARC(torch.optim.SGD(model.parameters(), lr), trust, mode)


def test_larc_scale_makes_every_step_a_share_of_the_weight():
    model, larc = _model("scale", trust=0.01, lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(3, 4, dtype=torch.float64)).square().sum().backward()
    larc.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert math.isclose(float((new.detach() - old).norm()), 0.01 * float(old.norm()), rel_tol=1e-6)


def test_larc_clip_never_raises_the_rate():
    for scale in (1e-6, 1.0, 1e6):
        model, larc = _model("clip")
        plain = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = scale * torch.randn_like(p)
        gradients = [p.grad.clone() for p in model.parameters()]
        larc.step()
        for old, gradient, new in zip(plain, gradients, model.parameters(), strict=True):
            allowed = min(0.1, 0.002 * float(old.norm()) / float(gradient.norm()))
            assert torch.allclose(new, old - allowed * gradient, rtol=1e-5, atol=1e-12)


def test_larc_of_zeros():
    model, larc = _model("scale", lr=1.0)
    nn.init.zeros_(model.bias)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    larc.step()
    assert torch.allclose(model.bias, torch.full_like(model.bias, -LARC_EPSILON))


def test_optimizers_by_name():
    model = nn.Linear(2, 2)
    for name, kind in (
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("larc", LARC),
    ):
        assert type(make_optimizer(model, OptimizerSettings(name=name))) is kind


def test_the_learning_rate_rises_and_falls():
    linear = ScheduleSettings("linear", warmup=4, final=0.1)
    assert [rate_at(step, 14, linear) for step in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert math.isclose(rate_at(14, 14, linear), 0.1)
    cosine = ScheduleSettings("cosine")
    assert math.isclose(rate_at(5, 10, cosine), 0.5)
    assert rate_at(7, 10, ScheduleSettings()) == 1


def test_the_slurm_file_names_the_run():
    text = slurm_script(BatchJob("run.toml", "runs/a", 4, 8, 8, 6, 2))
    for line in ("#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue"):
        assert line in text
    assert "srun halocline train run.toml --out runs/a" in text
