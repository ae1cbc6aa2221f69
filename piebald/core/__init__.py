"""The ground floor: errors, checks of arguments, randomness, files, and a model as one flat vector.

Nothing here knows what a client, a server or a method is, and it imports nothing of Piebald outside this room.
Whatever several rooms need, and is no contract between them, lies here.
"""
