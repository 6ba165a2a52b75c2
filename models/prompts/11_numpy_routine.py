import numpy as np


def moving_average(a, window, axis=-1):
    """
    Compute the moving average of an array along an axis.

    Parameters
    ----------
    a : array_like
        Input array.
    window : int
        Number of elements to average.
    axis : int, optional
        Axis along which the average is computed. Default is the last one.

    Returns
    -------
    out : ndarray
        Array with ``window - 1`` fewer elements along `axis`.

    Examples
    --------
    >>> moving_average([1, 2, 3, 4], 2)
    array([1.5, 2.5, 3.5])

    """
    a = np.asarray(a, dtype=float)
    if window < 1 or window > a.shape[axis]:
        raise ValueError("window must be between 1 and the length of the axis")
    total = np.cumsum(a, axis=axis)
    total = np.moveaxis(total, axis, -1)
    out = total[..., window - 1:].copy()
    out[..., 1:] -= total[..., :-window]
    return np.moveaxis(out / window, -1, axis)


def normalize(a, axis=-1, eps=1e-12):
    """
    Scale an array to zero mean and unit variance along an axis.

    Parameters
    ----------