"""A profile by layer as one HTML page that holds its data, its script and plotly.js, and fetches nothing.

Loads no torch, and plotly and jinja2 only to make a page.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from boundby.layers.dashboard import content, wording
from boundby.layers.records import ModelProfile
from boundby.webpage import environment

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
TEMPLATE = "page.html.j2"
SCRIPT = "page.js"
INSTALL = "the dashboard needs {}: pip install 'boundby[dashboard]' (or pip install plotly jinja2)"
UNKNOWN_FIELDS = {
    "device_self_s": "device times",
    "flops_self": "FLOPs",
    "bytes_self": "bytes moved",
    "memory_before_bytes": "memory",
    "activation_peak_bytes": "peak memory of a layer",
    "bound": "what limits a layer",
    "share_of_limit": "share of the limit",
    "gain_at_limit_s": "gain at the limit",
    "limits": "limits of the machine",
}


def page(profile: ModelProfile, title: str | None = None) -> str:
    """Return the page; `title` stands at its top in place of the model's name. Writes nothing.

    Raises ImportError with the command to install what is missing: plotly and jinja2 are an extra of the library.
    """
    template = _environment().get_template(TEMPLATE)
    return template.render(
        title=wording.clean(title or profile.model_name) or "a model",
        profile=profile,
        trusted=profile.coverage.status != "not representative",
        clock=_clock(profile),
        sections={
            "bottlenecks": content.bottlenecks(profile),
            "latency": content.latency(profile),
            "types": content.types(profile),
            "memory": content.memory(profile),
            "parameters": content.parameters(profile),
            "roofline": content.roofline(profile),
        },
        unknown=_unknown(profile),
        data={"total": content.total(profile), "layers": content.columns(profile)},
        plotly_js=_plotly_js(),
        script=_script(),
    )


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(INSTALL.format("plotly")) from error
    return str(get_plotlyjs())


def _environment() -> "Environment":
    try:
        made = environment(FOLDER)
    except ImportError as error:
        raise ImportError(INSTALL.format("jinja2")) from error
    for filter_ in (wording.clean, wording.duration, wording.percent, wording.whole):
        made.filters[filter_.__name__] = filter_
    return made


def _script() -> str:
    """Return the script in one function, so that none of its names is global."""
    return f'"use strict";\n(() => {{\n{(FOLDER / SCRIPT).read_text(encoding="utf-8")}}})();\n'


def _clock(profile: ModelProfile) -> str:
    """Return which clock the times of the layers are from."""
    timed = [layer for layer in profile.layers if layer.self_s]
    on_device = sum(layer.device_self_s is not None for layer in timed)
    if not on_device:
        return "host time"
    return "device time" if on_device == len(timed) else "device time, and host time where a layer has none"


def _unknown(profile: ModelProfile) -> dict[str, str]:
    """Return what is known of no layer, with the reason."""
    missing = [
        field
        for field in UNKNOWN_FIELDS
        if (profile.limits is None if field == "limits" else all(getattr(row, field) is None for row in profile.layers))
    ]
    reasons = {UNKNOWN_FIELDS[field]: content.reason(profile, field) for field in missing}
    timed = [layer.self_s for layer in profile.layers if layer.self_s]
    if timed and all(layer.p95 is None for layer in timed):
        reasons["95th percentiles"] = content.reason(profile, "p95")
    return reasons
