"""`paceline` in a process of its own, started as quickly as engines are in tests: `python -m support.quick_command`, in
the folder of the tests.
"""

from paceline.__main__ import main

if __name__ == "__main__":
    from support import quick_start  # noqa: F401

    main()
