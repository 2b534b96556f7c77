import pytest

# The suite ships with the package; without this its asserts would fail without showing what they compared.
pytest.register_assert_rewrite("oraculo.testing.broker_suite")
