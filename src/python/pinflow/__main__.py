"""`python -m pinflow` is the command line tool."""

from ._tool import main

main()
