"""`python -m headstart` is the `headstart` command."""

from headstart.processes import drop_working_directory

if __name__ == "__main__":
    drop_working_directory()
    from headstart.cli.main import main

    main()
