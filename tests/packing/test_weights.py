import numpy as np
import pytest

from jaxrl.packing.weights import fold_weights

MASKS = [np.array([False, True, True, True]), np.array([False, False]), np.array([False, True])]


@pytest.mark.parametrize(
    ("normaliser", "expected"),
    [("tokens", [1 / 4, 1 / 4]), ("sequences", [1 / 6, 1 / 2]), ("constant", [1 / 20, 1 / 20])],
)
def test_weights(normaliser, expected):
    weights = fold_weights(MASKS, normaliser, 10.0)
    for weight, mask, value in zip(weights, MASKS, [expected[0], 0, expected[1]], strict=True):
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, np.where(mask, np.float32(value), np.float32(0)))


def test_means_sum_to_one():
    rng = np.random.default_rng(0)
    masks = [rng.random(rng.integers(2, 50)) < 0.5 for _ in range(20)]
    for normaliser in ("tokens", "sequences"):
        assert sum(w.sum(dtype=np.float64) for w in fold_weights(masks, normaliser)) == pytest.approx(1, rel=1e-6)


def test_bad_arguments():
    with pytest.raises(ValueError, match='unknown normaliser "token"'):
        fold_weights(MASKS, "token", 0.0)
    with pytest.raises(ValueError, match="positive"):
        fold_weights(MASKS, "constant", 0.0)
    assert fold_weights([], "tokens", 0.0) == []
