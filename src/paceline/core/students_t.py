"""The quantile by which the 95 % interval of a mean follows from its standard error."""

# Quantiles 0.975 of Student's t with 1, 2, ... degrees of freedom; beyond the last one three terms
# of its expansion in 1 / freedom, which are right to 0.001.
_TABLE = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
          2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
          2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def t_95(freedom: int) -> float:
    """Return the t that Student's t of `freedom` degrees exceeds with a probability of 2.5 %.

    >>> t_95(2)
    4.303
    >>> round(t_95(60), 3)
    2.0
    """
    assert freedom >= 1
    if freedom <= len(_TABLE):
        return _TABLE[freedom - 1]
    return 1.960 + 2.372 / freedom + 2.823 / freedom**2
