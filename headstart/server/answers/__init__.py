"""The engine's updates and results, written as the objects of OpenAI's API."""
