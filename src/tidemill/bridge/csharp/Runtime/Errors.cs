using System;

namespace Tidemill
{
    /// <summary>What went wrong between a simulator and its trainer, or in how the bridge was used; the message says what to do.</summary>
    public class BridgeException : Exception
    {
        public BridgeException(string message) : base(message) { }

        public BridgeException(string message, Exception cause) : base(message, cause) { }
    }

    /// <summary>The shared memory holds what no trainer of this layout writes: a length, count or offset is wrong.</summary>
    public sealed class CorruptMemoryException : BridgeException
    {
        public CorruptMemoryException(string message) : base(message) { }
    }

    /// <summary>The trainer took longer than the deadline that was set.</summary>
    public sealed class DeadlineException : BridgeException
    {
        public DeadlineException(string message) : base(message) { }
    }

    /// <summary>Bytes that came over a side channel are not what its format says.</summary>
    public sealed class ChannelException : BridgeException
    {
        public ChannelException(string message) : base(message) { }
    }
}
