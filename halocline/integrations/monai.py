"""Networks of MONAI bundles, with their weights, for cut volumes.

    model = halocline.integrations.monai_bundle("spleen_ct_segmentation")

and in the settings of a run::

    model = "halocline.integrations:monai_bundle"
    network = {path = "spleen_ct_segmentation"}
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError, did_you_mean
from ..train.export import load_weights

_CONFIGS = [f"{name}.{suffix}" for name in ("inference", "train") for suffix in ("json", "yaml", "yml")]


def monai_bundle(
    path: str | Path, *, network: str = "network_def", weights: str = "models/model.pt", config: str | None = None
) -> nn.Module:
    """The network of a MONAI bundle in the folder ``path``, with the bundle's weights.

    ``network`` is its id in the configuration, ``config`` the file (seen from the bundle; by default
    ``configs/inference.json`` or ``.yaml``, else ``configs/train``). ``weights`` are seen from the bundle too; with ""
    the network is initialised anew. Nothing is downloaded. A configuration may run any code: load bundles that you
    trust.
    """
    try:
        parser = import_module("monai.bundle").ConfigParser()
    except ModuleNotFoundError as error:
        raise ConfigError(f"a bundle needs {error.name}; pip install 'halocline[zoo-monai]'") from error
    folder = Path(path)
    parser.read_config(str(_config(folder, config)))
    parser["bundle_root"] = str(folder)
    if network not in parser:
        raise ConfigError(
            f"{folder}: the bundle's configuration has no {network!r}{did_you_mean(network, _ids(parser))}; name the "
            "id of its network: monai_bundle(path, network=...)"
        )
    made = parser.get_parsed_content(network)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{folder}: {network!r} of the bundle is a {type(made).__name__}, not a network")
    if weights:
        file = folder / weights
        if not file.is_file():
            raise ConfigError(f'{file} is missing; give weights="models/..." of this bundle, or weights="" for none')
        load_weights(made, file)
    return made


def _config(folder: Path, config: str | None) -> Path:
    """The configuration to read. Raises ConfigError where there is none."""
    names = [config] if config is not None else [f"configs/{name}" for name in _CONFIGS]
    found: Iterator[Path] = (folder / name for name in names if (folder / name).is_file())
    path = next(found, None)
    if path is None:
        raise ConfigError(f"{folder} is no bundle: it has no {names[0]}" + (f", ..., {names[-1]}" if names[1:] else ""))
    return path


def _ids(parser: Any) -> list[str]:
    """The ids at the top of a configuration."""
    return [str(name) for name in (parser.config or {})]
