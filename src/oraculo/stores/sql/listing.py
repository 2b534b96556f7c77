"""The statement that lists runs, for both SQL stores."""

from collections.abc import Sequence


def one_list_a_status(list_runs: str, filters: str, statuses: Sequence[str], limit: str) -> str:
    """Return `list_runs` with its filters. With several statuses, it merges the newest runs of each.

    The index of statuses gives the newest runs of one status without a sort, and cannot do so for several at once.
    """
    lists = [list_runs.replace("/* filters */", f"{filters} {status}") for status in statuses or ("",)]
    if len(lists) == 1:
        return lists[0]
    return " UNION ALL ".join(f"SELECT * FROM ({one}) AS runs" for one in lists) + f" ORDER BY 1 DESC LIMIT {limit}"
