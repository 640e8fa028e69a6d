"""Tools of chat requests: read, put into the prompt, forced by grammars, read out of answers."""
