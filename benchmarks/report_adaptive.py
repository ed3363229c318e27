"""The tables of docs/adaptive.md, from benchmarks/results/adaptive/ and, beside AMX, adaptive_amx/."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from benchmarks.report_drafting import read, table

LENGTHS = ("off", "2", "4", "8", "16")
CONTROL = "off again"  # benchmarks.adaptive.driver's
LOW = 0.95  # of the best length's rate
REQUESTS = (f"a request in ten is below [{CONTROL}]", f"the slowest [{CONTROL}]")
HOST_FIGURES = ("host_ms", "scheduler_and_drafts_ms", "commit_to_launch_ms")
PARTS = (
    "schedule",
    "drafter",
    "choose",
    "draft stage",
    "build",
    "verify",
    "commit",
    "publish",
    "drafter learns",
    "adaptive learns",
    "other",
)


def result(name: str, folder: str = "adaptive") -> dict[str, Any]:
    return read(f"{folder}/{name}")


def interval(cell: dict[str, float]) -> str:
    """A median ratio with its interval."""
    return f"{cell['median']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})"


def beside_control(contenders: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> str:
    """A figure of adaptive, and in brackets the control's; "-" in results of before there was one."""
    again = show(contenders[CONTROL]) if CONTROL in contenders else "-"
    return f"{show(contenders['adaptive'])} [{again}]"


def requests_beside_control(contenders: dict[str, Any]) -> list[str]:
    """What one request in ten is below, and the slowest."""

    def show(name: str) -> str:
        return beside_control(contenders, lambda cell: f"{cell[name]:.2f}")

    return [show(f"{which}_request_over_off") for which in ("p10", "slowest")]


def cells_of(models: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(model, workload, what was measured), in order."""
    return [(model, name, found) for model, part in models.items() for name, found in part["workloads"].items()]


def regret_table(folder: str = "adaptive") -> str:
    rows = []
    for model, name, found in cells_of(result("regret", folder)["models"]):
        for size, cell in [*found["table"]["sizes"].items(), ("1 to 32", found["table"]["trace"])]:
            speeds = {each: of["over_off"]["median"] for each, of in cell["contenders"].items()}
            lengths = [f"{speeds[length]:.2f}" for length in LENGTHS]
            rows.append([model, name, size, *lengths, f"{speeds['adaptive']:.2f}", f"{cell['adaptive_over_best']:.1%}"])
    return table(["model", "text", "requests", *LENGTHS, "adaptive", "adaptive / best length"], rows)


def breadth_table() -> str:
    drafters = result("breadth")["drafters"]
    rows = [
        [drafter, text, *(f"{cell['adaptive_over_best']:.1%} [{cell['best_length']}]" for cell in sizes.values())]
        for drafter, texts in drafters.items()
        for text, sizes in texts.items()
    ]
    return table(["drafter", "text", "1 request", "4", "16", "1 to 32"], rows)


def breadth_least() -> str:
    """What the least of all cells is, in words."""
    cells = [
        (cell["adaptive_over_best"], f"{drafter}, {text}, {'1 to 32' if size == 'trace' else size}")
        for drafter, texts in result("breadth")["drafters"].items()
        for text, sizes in texts.items()
        for size, cell in sizes.items()
    ]
    least, where = min(cells)
    num_low = sum(ratio < LOW for ratio, _ in cells)
    return f"The least of these {len(cells)} cells is {least:.1%} ({where}); below {LOW:.0%}: {num_low}."


def regret_wall_table() -> str:
    rows = []
    for model, name, found in cells_of(result("regret")["models"]):
        for size, cell in found["wall"].items():
            best = cell["contenders"][cell["best_length"]]["over_off"]
            adaptive = cell["contenders"]["adaptive"]["over_off"]
            ratio = interval(cell["adaptive_over_best"])
            requests = "1 to 16" if size == "trace" else size
            rows.append([model, name, requests, f"{interval(best)} [{cell['best_length']}]", interval(adaptive), ratio])
    head = ["model", "text", "requests", "best length / off [it]", "adaptive / off", "adaptive / best length"]
    return table(head, rows)


def gain_table(folder: str = "adaptive") -> str:
    rows = []
    for model, name, found in cells_of(result("gain", folder)["models"]):
        for size, cell in found["wall"]["sizes"].items():
            adaptive = cell["contenders"]["adaptive"]
            rows.append(
                [
                    model,
                    name,
                    size,
                    f"{cell['pooled_over_off']:.2f}",
                    interval(adaptive["over_off"]),
                    *requests_beside_control(cell["contenders"]),
                    f"{cell['end_to_end_over_off']:.2f}",
                    f"{adaptive['acceptance_length']:.2f}",
                    f"{adaptive['draft_rows_per_token']:.2f}",
                ]
            )
    head = ["model", "text", "requests", "decoding, adaptive / off", "pair by pair", *REQUESTS]
    return table([*head, "end to end", "acceptance length", "draft rows a token"], rows)


def lengths_table() -> str:
    rows = []
    for model, name, sizes in cells_of(result("lengths")["models"]):
        for size, parts in sizes.items():
            for tokens, cell in parts.items():
                each = [f"{cell[f'{which}_over_off']:.2f}" for which in ("adaptive", "p10_request", "slowest_request")]
                rows.append([model, name, size, tokens, *each])
    head = ["model", "text", "requests", "tokens of each", "adaptive / off", "a request in ten is below", "the slowest"]
    return table(head, rows)


def ceiling_table() -> str:
    rows = []
    for model, name, sizes in cells_of(result("ceiling")["models"]):
        for size, cell in sizes.items():
            shares = [f"{cell['share_of_hindsight'][kind]:.0%}" for kind in ("nodes", "length")]
            odds = f"{cell['odds']['share_of_hindsight']:.0%}"
            rows.append([model, name, size, f"{cell['adaptive_over_off']:.2f}", *shares, odds])
    head = ["model", "text", "requests", "adaptive / off", "of accepted nodes only"]
    return table([*head, "of the best length in hindsight", "exact odds of it, on draws"], rows)


def never_slower_table() -> str:
    rows = []
    for model, part in result("never_slower")["models"].items():
        for name, sizes in part["cells"].items():
            for size, cell in sizes.items():
                by = cell["contenders"]
                ratios = [interval(by[each]["over_off"]) if each in by else "-" for each in ("adaptive", CONTROL)]
                share = f"{cell['draft_row_share_once_learned']:.2%}"
                rows.append([model, name, size, *ratios, *requests_beside_control(by), share])
    head = ["model", "what gains nothing", "requests", "adaptive / off", f"{CONTROL} / off", *REQUESTS]
    return table([*head, "draft rows behind 32 steps"], rows)


def row_price_table() -> str:
    """By model, number of requests and draft rows of each: the figures of all starts, lowest to highest."""
    rows = []
    for model, part in result("row_price")["models"].items():
        starts = [start["sizes"] for start in part["starts"]]
        for size in starts[0]:
            steps = lowest_to_highest(start[size]["real_over_predicted"]["median"] for start in starts)
            for length in sorted(starts[0][size].keys() - {"real_over_predicted"}, key=int):
                cells = [start[size][length] for start in starts]
                prices = [
                    lowest_to_highest((cell[kind]["median"] for cell in cells), 0)
                    for kind in ("real_us", "believed_us")
                ]
                rows.append([model, size, length, *prices, steps])
    return table(
        ["model", "requests", "draft rows of each", "a row, us", "believed, us", "plain step / believed"], rows
    )


def lowest_to_highest(values: Iterable[float], digits: int = 2) -> str:
    ordered = sorted(values)
    return f"{ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f}"


def overhead_table() -> str:
    rows = []
    for model, part in result("overhead")["models"].items():
        for name, cell in part["contenders"].items():
            parts = [f"{cell['median_ms_by_part'].get(each, 0.0):.2f}" for each in PARTS]
            host = f"{cell['host_ms']:.2f} ({min(cell['host_ms_of_runs']):.2f} to {max(cell['host_ms_of_runs']):.2f})"
            sampling = f"{cell['median_ms_by_part']['sampling']:.2f}"
            rows.append([model, name, host, f"{cell['scheduler_and_drafts_ms']:.2f}", *parts, sampling])
    head = ["model", "drafts", "host ms (of five runs)", "of it scheduler and drafts"]
    return table([*head, *PARTS, "beside it: sampling"], rows)


def warm_overhead_table() -> str:
    runs = ("caches_left_alone", "without_pause")
    rows = [
        [model, name, *(f"{cell[run][each]:.2f}" for run in runs for each in HOST_FIGURES)]
        for model, part in result("overhead")["models"].items()
        for name, cell in part["contenders"].items()
    ]
    head = ["scheduler and drafts", "commit to launch"]
    return table(["model", "drafts", "waited for: host ms", *head, "no pause: host ms", *head], rows)


def device_host_table() -> str:
    found = result("device_host")
    rows = []
    for name, cell in found["contenders"].items():
        parts = [f"{cell[each]:.2f}" for each in ("reading_ms", "gap_ms", "launch_ms", "publish_ms")]
        parts += [f"{cell['median_ms_by_part'].get('drafter', 0.0):.2f}", f"{cell['without_pause']['gap_ms']:.2f}"]
        rows.append([name, cell["draft_rows_per_step"], f"{cell['acceptance_length']:.2f}", *parts])
    head = ["drafts", "draft rows a step", "acceptance length", "reading ms", "commit to launch", "launch", "publish"]
    head += ["of commit to launch the drafter", "no pause: commit to launch"]
    return table(head, [list(map(str, row)) for row in rows])


def budget_table() -> str:
    found = result("budget")
    rows = [
        [caches, part, f"{cell['median_ms']:.2f}", f"{cell['p90_ms']:.2f}"]
        for caches, each in found["caches"].items()
        for part, cell in each["parts"].items()
    ]
    return table(["caches", "part", "median ms", "p90"], rows)


def prefill_table() -> str:
    rows = [
        [
            name,
            f"{cell['median_ms']['median']:.1f}",
            f"{cell['p99_ms']['median']:.1f}",
            interval(cell["p99_over_quiet"]),
            f"{cell['pooled_p99_over_quiet']:.2f}",
            "-" if name == "quiet" else f"{cell['first_token_s']['median']:.2f}",
        ]
        for name, cell in result("prefill")["cases"].items()
    ]
    return table(
        ["prompt", "inter-token ms p50", "p99", "p99 / quiet", "all rounds", "its time to first token, s"], rows
    )


def prompt_load_table() -> str:
    rows = []
    for bound, cell in result("prompt_load")["bounds"].items():
        seconds = [f"{cell[name]['median']:.2f}" for name in ("first_token_s", "p95_first_token_s")]
        between = [f"{cell[name]['median']:.1f}" for name in ("inter_token_ms", "p99_inter_token_ms")]
        speed = f"{cell['tokens_per_s']['median']:.0f}", interval(cell["tokens_per_s_over_default"])
        rows.append([bound, *speed, *seconds, *between])
    head = ["prompts stretch a step to", "tokens/s", "over the default's", "time to first token, s", "p95"]
    return table([*head, "inter-token ms p50", "p99"], rows)


def prefix_table() -> str:
    found = result("prefix")
    rows = []
    for name, cell in found["median_first_token_s"].items():
        ratio = interval(found["cold_over"][name]) if name in found["cold_over"] else "1"
        rows.append([name, f"{cell['median']:.3f}", ratio])
    return table(["prefix", "median time to first token, s", "cold / this"], rows)


def reliability_table() -> str:
    """Calibrated probability against frequency, all numbers of requests together."""
    rows = []
    for model, name, found in cells_of(result("regret")["models"]):
        sizes = found["table"]["sizes"]
        tenths = pooled_tenths(sizes)
        pairs = [f"{expected / count:.2f}: {hits / count:.2f}" if count else "-" for count, expected, hits in tenths]
        error = sum(abs(expected - hits) for _, expected, hits in tenths) / sum(count for count, _, _ in tenths)
        worst = max(max(cell["calibration_error"].values()) for cell in sizes.values())
        rows.append([model, name, f"{error:.3f}", f"{worst:.3f}", *pairs])
    head = ["model", "text", "calibration error", "of the worst cell", *(f"{tenth / 10:.1f}" for tenth in range(10))]
    return table(head, rows)


def pooled_tenths(sizes: dict[str, Any]) -> list[tuple[float, float, float]]:
    """(edges, sum of their probabilities, hits) by tenths of probability, of all sizes of one workload."""
    kept = [each for cell in sizes.values() for name, each in cell["reliability"].items() if name != "none"]
    return [tuple(sum(each[key][i] for each in kept) for key in ("count", "expected", "hits")) for i in range(10)]  # type: ignore[misc]


TABLES: dict[str, Callable[[], str]] = {
    "regret": regret_table,
    "regret amx": partial(regret_table, "adaptive_amx"),
    "breadth": breadth_table,
    "breadth least": breadth_least,
    "regret wall": regret_wall_table,
    "gain": gain_table,
    "gain amx": partial(gain_table, "adaptive_amx"),
    "lengths": lengths_table,
    "ceiling": ceiling_table,
    "never slower": never_slower_table,
    "row price": row_price_table,
    "overhead": overhead_table,
    "overhead warm": warm_overhead_table,
    "device host": device_host_table,
    "budget": budget_table,
    "prefill": prefill_table,
    "prompt load": prompt_load_table,
    "prefix": prefix_table,
    "reliability": reliability_table,
}
