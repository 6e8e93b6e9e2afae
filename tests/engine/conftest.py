import pytest
from engine_model import random_variables


@pytest.fixture(scope="session")
def variables():
    return random_variables(0)
