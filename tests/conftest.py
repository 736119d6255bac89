"""`pytest --hypothesis-profile thorough` looks 20 times longer than the default profile, at other examples each
time."""

from hypothesis import settings

settings.register_profile("thorough", max_examples=2000, deadline=None)


def counted(config) -> list[dict]:
    "What tests on random configurations recorded (triton_cases.record); from all processes."
    import json
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = [r for kind in ("passed", "failed") for r in (reporter.stats.get(kind, []) if reporter else [])]
    return [
        json.loads(v)
        for r in reports
        if getattr(r, "when", "") == "call"
        for k, v in r.user_properties
        if k == "selection"
    ]


def shares(found):
    """Shares of rows and of configurations whose selection is float64's own; every row's values are compared,
    whichever way a near tie fell."""
    return sum(x["same"] for x in found) / sum(x["rows"] for x in found), sum(
        x["same"] == x["rows"] for x in found
    ) / len(found)


def pytest_sessionfinish(session):
    found = counted(session.config)
    if len(found) >= 50 and session.exitstatus == 0 and (shares(found)[0] < 0.95 or shares(found)[1] < 0.6):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, config):
    if not (found := counted(config)): return
    rows, whole = shares(found)
    worst = {a: max(x["worst"][a] for x in found) for a in found[0]["worst"]}
    terminalreporter.write_line(
        f"{len(found)} random configurations, {sum(x['rows'] for x in found):,} rows compared, each with the "
        f"kernels' selection; it is float64's own in {rows:.4%} of rows (at least 95 %) "
        f"and throughout {whole:.1%} of configurations (at least 60 %). Largest share of a tolerance used: "
        + ", ".join(f"{a} {x:.2f}" for a, x in worst.items())
    )
