"""Every exception Ramify raises on purpose.

RamifyError
├── InvalidInputError          a caller's value is wrong (also a ValueError)
│   └── UnsupportedError       the value is meaningful, but this version cannot serve it
│       └── UnsupportedAttributeError  a name that vLLM's class has and Ramify's has not (also an AttributeError)
├── ModelError                 a model could not be had
│   ├── ModelNotFoundError     nothing there, or it could not be fetched
│   ├── FileFormatError        a file is damaged, truncated, or not what it claims to be
│   ├── UnsupportedModelError  a sound file of an architecture, format or tokenizer we do not know
│   └── WeightsError           tensors missing, left over, or of the wrong shape
├── ChatTemplateError          a chat template failed or went past its limits
├── IllegalMoveError           a sequence was asked to make a move its state does not allow
├── CacheExhaustedError        blocks were asked for that are not there
├── EngineBusyError            a call came from inside another call of the same engine
├── EngineAsleepError          an engine that sleeps was asked for something
├── EngineFaultError           a step of an asynchronous engine failed, and with it every request that was running
│   └── EngineLostError        the engine's process has ended, and with it every request
├── ProtocolError              what came from another process is not what it may send
└── EngineClosedError          an asynchronous engine was shut down and takes no more requests
"""

from __future__ import annotations


class RamifyError(Exception):
    """Base of all errors Ramify raises on purpose."""


class InvalidInputError(RamifyError, ValueError):
    """A value that a caller gave is wrong; the message names the field, the value and what is allowed."""


class UnsupportedError(InvalidInputError):
    """The request is meaningful, but this version cannot serve it."""


class UnsupportedAttributeError(UnsupportedError, AttributeError):
    """An attribute that vLLM's class of the same name has; the message says what to use instead."""


class ModelError(RamifyError):
    """A model could not be loaded."""


class ModelNotFoundError(ModelError):
    """No model stands at the given place, or it could not be fetched."""


class FileFormatError(ModelError):
    """A file is damaged, truncated, or not what it claims to be."""


class UnsupportedModelError(ModelError):
    """A sound file whose architecture, quantisation or tokenizer Ramify does not know."""


class WeightsError(ModelError):
    """A checkpoint's tensors do not fit the model: missing, left over, or of another shape."""


class ChatTemplateError(RamifyError, ValueError):
    """A chat template failed, or went past its size or time limit."""


class IllegalMoveError(RamifyError, RuntimeError):
    """A sequence was asked to make a move that its state does not allow."""


class CacheExhaustedError(RamifyError, RuntimeError):
    """More KV blocks were asked for than are free."""


class EngineBusyError(RamifyError, RuntimeError):
    """A call came from inside another call of the same engine, which it would have waited for for ever."""


class EngineAsleepError(RamifyError, RuntimeError):
    """The engine has given its memory back, and was asked for something before `wake_up`."""


class EngineFaultError(RamifyError, RuntimeError):
    """A step failed: every request that was running or waiting has ended with it."""


class EngineLostError(EngineFaultError):
    """The engine's process has ended, and every request with it. Only a new engine can go on."""


class ProtocolError(RamifyError, RuntimeError):
    """A message between processes is damaged, too large, or not one that may be sent."""


class EngineClosedError(RamifyError, RuntimeError):
    """The engine was shut down, or is being shut down, and takes no more requests."""
