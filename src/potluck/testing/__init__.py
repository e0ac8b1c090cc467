"""Public test suite for methods: conformance to the contract, and the limits that a method states.

from potluck.testing import check_method
check_method(MyMethod)
"""

from potluck.testing.conformance import Check, check_method, checks_of

__all__ = ["Check", "check_method", "checks_of"]
