"""What holds the project as it is while its code is moved: goldens, and a list of planted bugs that tests catch."""
