"""Delay before another attempt."""


def pause_after(failures: int, least: float, most: float) -> float:
    """Compute the delay after so many failures in a row: `least` after one, then twice as long each time, up to `most`.

    In the unit of `least` and `most`. 0.0 where nothing has failed yet.
    """
    if failures < 1:
        return 0.0
    return min(least * 2.0 ** min(failures - 1, 64), most)  # 64 doublings: more would overflow a float one day
