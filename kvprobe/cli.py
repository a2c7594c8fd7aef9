"""The command line. Every field of a probe's config is an option; options of a policy are valid only with that policy."""

from __future__ import annotations

import dataclasses
import signal
import sys
from typing import Annotated

USAGE = """usage: kvprobe COMMAND ...

  run PROBE [--preset smoke|demo|paper] [--out DIR] [--FIELD VALUE ...]   run a probe, or resume or show its folder
  list                         policies, probes, figures
  show DIR                     print a run's table and checks
  figure NAME DIR              draw a figure of a run again
  rerun MANIFEST --out DIR     run again what a manifest describes and compare the rows
  audit DIR                    replay a planted_fact run on the full cache with per-head masks and compare log p
  simulate [--FIELD VALUE ...] keep-sets of a policy that needs no model, at the papers' sizes
  memory --model M --context N bytes of a model's cache by kind of layer, from its config alone
  calibrate POLICY --out FILE  statistics of a model that a policy scores by
  traces --out FILE            write filler text with a model
  --version

kvprobe COMMAND --help says more.
exit codes: 0 done; 1 bad input, nothing was lost; 2 a check of the instrument failed, everything was written; 130 interrupted"""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `kvprobe` script; returns the exit code."""
    if argv is None and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe (`kvprobe list | head`) is no error
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if argv else 1
    if argv[0] == "--version":
        from . import __version__

        print(f"kvprobe {__version__}")
        return 0
    commands = {"run": _run, "list": _list, "show": _show, "figure": _figure, "rerun": _rerun, "audit": _audit, "simulate": _simulate, "memory": _memory, "calibrate": _calibrate, "traces": _traces}
    if argv[0] not in commands:
        print(f"kvprobe: command {argv[0]!r} is unknown\n\n{USAGE}", file=sys.stderr)
        return 1
    try:
        return commands[argv[0]](argv[1:])
    except (ValueError, RuntimeError, OSError, FloatingPointError) as error:
        print(f"kvprobe: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nkvprobe: interrupted; run the same command again to go on from the last whole batch", file=sys.stderr)
        return 130
    except SystemExit as stop:  # tyro ends with 2 for bad input, which here means a failed check
        return 1 if stop.code else 0


def _parse(kind: type, argv: list[str], prog: str, description: str, default=None):
    import tyro

    return tyro.cli(kind, args=argv, prog=f"kvprobe {prog}", description=description, default=default,
                    config=(tyro.conf.FlagConversionOff, tyro.conf.OmitSubcommandPrefixes))


# -- run --------------------------------------------------------------------------------------------------------------


def _run(argv: list[str]) -> int:
    from . import runner
    from .registry import available, find

    if not argv or argv[0].startswith("-"):
        print("usage: kvprobe run PROBE [--preset smoke|demo|paper] [--out DIR] [--FIELD VALUE ...]\n\nprobes:")
        for name, line in available("probe").items():
            print(f"  {name:16} {line}")
        return 0 if argv and argv[0] in ("-h", "--help") else 1
    probe, rest = argv[0], argv[1:]
    module = find("probe", probe)
    preset = _peek(rest, "--preset") or "demo"
    if preset not in module.PRESETS:
        raise ValueError(f"preset {preset!r} is unknown; known: {', '.join(module.PRESETS)}")
    options, policy = _options(module, module.PRESETS[preset], _peek(rest, "--policy"))
    _check_names(rest, module, policy)
    parsed = _parse(options, rest, f"run {probe}", _help(module, probe, preset, policy))
    given = _given(rest, module, parsed)
    out = runner.run(probe, preset=parsed.preset, out=parsed.out, say=_say, **given)
    return _print_run(out)


def _check_names(argv: list[str], module, policy: str | None) -> None:
    """Refuse options that do not exist, saying which do."""
    from .registry import find, make_policy

    names = [word[2:].split("=", 1)[0].replace("-", "_") for word in argv if word.startswith("--")]
    own: set[str] = set()
    if policy:
        make_policy(policy, {})
        own = {f.name for f in dataclasses.fields(find("policy", policy).POLICY)}
    for name in names:
        if policy and name.startswith("policy.") and name[7:] not in own:
            make_policy(policy, {name[7:]: None})
    known = [f.name for f in dataclasses.fields(module.CONFIG) if f.name != "policy_options"] + ["preset", "out", "help"]
    unknown = sorted({n for n in names if not (policy and n.startswith("policy."))} - set(known))
    if unknown:
        raise ValueError(f"unknown option {', '.join('--' + n.replace('_', '-') for n in unknown)}; options: {', '.join('--' + n.replace('_', '-') for n in sorted(known))}")


def _peek(argv: list[str], flag: str) -> str | None:
    """The value of an option that decides which options there are."""
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(flag + "="):
            return word.split("=", 1)[1]
    return None


def _options(module, preset, policy: str | None):
    """A dataclass of everything `run` takes: the config's fields, the policy's under `--policy.`, preset and out."""
    import tyro

    from .registry import find

    policy = policy or getattr(preset, "policy", None)
    chosen = find("policy", policy).POLICY if policy else None
    docs = _docs(module.CONFIG)
    fields = [("preset", Annotated[str, tyro.conf.arg(help=f"one of: {', '.join(module.PRESETS)}")], "demo"),
              ("out", Annotated[str | None, tyro.conf.arg(help="the run's folder; default runs/NAME-PRESET-HASH")], None)]
    for f in dataclasses.fields(module.CONFIG):
        if f.name != "policy_options":
            fields.append((f.name, Annotated[_type_of(module.CONFIG, f.name), tyro.conf.arg(help=docs.get(f.name, ""))], getattr(preset, f.name)))
    made = dataclasses.fields(chosen) if chosen else ()
    if made:
        own = dataclasses.make_dataclass("PolicyOptions", [_policy_field(chosen, f) for f in made], frozen=True)
        own.__doc__ = (chosen.__doc__ or "").strip()
        fields.append(("policy_fields", Annotated[own, tyro.conf.arg(name="policy")], dataclasses.field(default_factory=own)))
    return dataclasses.make_dataclass("Options", fields, frozen=True), policy


def _policy_field(policy: type, f: dataclasses.Field):
    import tyro

    kind = Annotated[_type_of(policy, f.name), tyro.conf.arg(help=_docs(policy).get(f.name, ""))]
    return (f.name, kind, dataclasses.field(default=f.default) if f.default is not dataclasses.MISSING else dataclasses.field(default_factory=f.default_factory))


def _type_of(kind: type, name: str):
    import typing

    return typing.get_type_hints(kind)[name]


def _docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    import ast
    import inspect
    import textwrap

    docs: dict[str, str] = {}
    for base in [k for k in reversed(kind.__mro__) if dataclasses.is_dataclass(k)]:
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        docs |= {a.target.id: b.value.value for a, b in zip(body, body[1:])
                 if isinstance(a, ast.AnnAssign) and isinstance(b, ast.Expr) and isinstance(b.value, ast.Constant)}
    return docs


def _help(module, probe: str, preset: str, policy: str) -> str:
    return f"{(module.__doc__ or probe).splitlines()[0]} Defaults below: preset {preset}{f', policy {policy}' if policy else ''}."


def _given(argv: list[str], module, parsed) -> dict:
    """The fields that the user named; the preset supplies the others."""
    names = {word[2:].split("=", 1)[0].replace("-", "_") for word in argv if word.startswith("--")}
    given = {f.name: getattr(parsed, f.name) for f in dataclasses.fields(module.CONFIG) if f.name in names}
    own = {name.split(".", 1)[1]: getattr(parsed.policy_fields, name.split(".", 1)[1]) for name in names if name.startswith("policy.")}
    if own:
        given["policy"], given["policy_options"] = parsed.policy, own
    return given


def _say(text: str) -> None:
    print(f"kvprobe: {text}", file=sys.stderr)


def _print_run(run) -> int:
    print(run.manifest.get("title", run.path.name))
    print()
    print(run.table.to_string(index=False))
    if run.checks:
        print("\nchecks of the instrument")
        for check in run.checks:
            print(check.line())
    figures = sorted((run.path / "figures").glob("*.png"))
    print(f"\nrows: {run.path / 'rows.jsonl'} ({len(run.rows)})\nmanifest: {run.path / 'manifest.json'}")
    for path in figures:
        print(f"figure: {path}")
    if run.manifest.get("status") != "finished":
        print("this run is not finished: the same `kvprobe run` command goes on with it")
    return 0 if run.ok else 2


# -- the other commands -----------------------------------------------------------------------------------------------


def _positional(name: str, what: str):
    import tyro

    return (name, Annotated[tyro.conf.Positional[str], tyro.conf.arg(help=what, metavar=name.upper())])


def _args(argv: list[str], prog: str, description: str, *fields):
    return _parse(dataclasses.make_dataclass(prog.capitalize(), fields, frozen=True), argv, prog, description)


def _list(argv: list[str]) -> int:
    from .registry import available

    _args(argv, "list", "List policies, probes and figures.")
    for kind, plural in (("policy", "policies"), ("probe", "probes"), ("figure", "figures")):
        print(plural)
        for name, line in available(kind).items():
            print(f"  {name:16} {line}")
    return 0


def _show(argv: list[str]) -> int:
    from .runner import Run

    args = _args(argv, "show", "Print a run's table and checks.", _positional("dir", "the run's folder"))
    return _print_run(Run.read(args.dir))


def _figure(argv: list[str]) -> int:
    from .runner import Run, save_figures

    args = _args(argv, "figure", "Draw a figure of a run again, as .png and .pdf.", _positional("name", "a figure of `kvprobe list`, or a .py file"), _positional("dir", "the run's folder"))
    for path in save_figures(Run.read(args.dir), [args.name]):
        print(path)
    return 0


def _rerun(argv: list[str]) -> int:
    from .runner import rerun

    args = _args(argv, "rerun", "Run again what a manifest describes and compare the rows.", _positional("manifest", "manifest.json of a run, or its folder"), ("out", str))
    return _print_run(rerun(args.manifest, out=args.out, say=_say))


def _audit(argv: list[str]) -> int:
    from .audit import audit_run

    args = _args(argv, "audit", "Replay a run on the full cache with per-head masks rebuilt from its keep log.", _positional("dir", "the run's folder"),
                 ("limit", int, 0))
    result = audit_run(args.dir, limit=args.limit or None)
    print(result.text())
    return 0 if result.ok else 2


def _simulate(argv: list[str]) -> int:
    from .simulate import Settings, command

    print(command(_parse(Settings, argv, "simulate", "What a policy that reads positions and draws only keeps, without a model (Random Attention app. D).")))
    return 0


def _memory(argv: list[str]) -> int:
    from .memory import Settings, command

    print(command(_parse(Settings, argv, "memory", "Bytes of a model's cache by kind of layer, whole and compressed, from its config alone (methods R5).")))
    return 0


def _calibrate(argv: list[str]) -> int:
    from . import calibration

    if argv and not argv[0].startswith("-"):
        argv = ["--policy", *argv]  # `kvprobe calibrate triattention`
    settings = _parse(calibration.Settings, argv, "calibrate", "Statistics of a model's pre-RoPE queries, for --policy.statistics.")
    print(calibration.command(settings, say=_say))
    return 0


def _traces(argv: list[str]) -> int:
    from .make_traces import Settings, make

    settings = _parse(Settings, argv, "traces", "Write reasoning text with a model, for use as filler.")
    make(settings, say=_say)
    return 0

