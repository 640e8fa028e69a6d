"""From what the engine gives to the objects of OpenAI's API."""
