"""Shell completion: the scripts for bash, zsh and fish, and the program that they call for candidates."""
