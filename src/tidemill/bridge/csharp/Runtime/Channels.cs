using System;
using System.Collections.Generic;
using System.IO;

namespace Tidemill
{
    /// <summary>How a message over side channels says whose it is; both sides choose the same.</summary>
    public enum Framing
    {
        /// <summary>By the channel's UUID.</summary>
        Uuid,

        /// <summary>By a number, as older trainers do.</summary>
        Type,
    }

    /// <summary>The side channels of this end: messages that go along with the turns.</summary>
    public sealed class Channels
    {
        private readonly Framing framing;
        private readonly List<SideChannel> channels = new List<SideChannel>();

        public Channels(Framing framing = Framing.Uuid)
        {
            this.framing = framing;
        }

        /// <summary>Messages that came for channels that nobody has registered here.</summary>
        public int Unknown { get; private set; }

        public T Register<T>(T channel) where T : SideChannel
        {
            foreach (SideChannel other in channels)
            {
                if (framing == Framing.Uuid ? other.Id == channel.Id : other.Type == channel.Type)
                {
                    throw new BridgeException("The side channel " + (framing == Framing.Uuid ? channel.Id.ToString() : "of type " + channel.Type) + " is registered already.");
                }
            }
            channels.Add(channel);
            return channel;
        }

        /// <summary>What was sent since the last call, as bytes for the trainer.</summary>
        internal byte[] Outgoing()
        {
            MemoryStream bytes = null;
            foreach (SideChannel channel in channels)
            {
                foreach (byte[] message in channel.TakeQueued())
                {
                    bytes = bytes ?? new MemoryStream();
                    byte[] key = framing == Framing.Uuid ? channel.Id.ToByteArray() : MessageWriter.Bytes(channel.Type);
                    bytes.Write(key, 0, key.Length);
                    bytes.Write(MessageWriter.Bytes(message.Length), 0, 4);
                    bytes.Write(message, 0, message.Length);
                }
            }
            return bytes == null ? SideChannel.Nothing : bytes.ToArray();
        }

        /// <summary>Hand what the trainer sent to the channels.</summary>
        internal void Incoming(byte[] data)
        {
            var reader = new MessageReader(data, "side channels (framing " + framing + " here)");
            while (reader.Left > 0)
            {
                Guid id = framing == Framing.Uuid ? new Guid(reader.Bytes(16)) : Guid.Empty;
                int type = framing == Framing.Type ? reader.Integer() : 0;
                byte[] message = reader.Bytes(reader.Integer());
                SideChannel channel = channels.Find(c => framing == Framing.Uuid ? c.Id == id : c.Type == type);
                if (channel == null)
                {
                    Unknown++;
                }
                else
                {
                    channel.Receive(message);
                }
            }
        }
    }

    /// <summary>A side channel: derive one's own from it, or take one of those below.</summary>
    public abstract class SideChannel
    {
        internal static readonly byte[] Nothing = new byte[0];

        private readonly List<byte[]> queue = new List<byte[]>();

        /// <param name="id">Tells channels apart; the same at both ends.</param>
        /// <param name="type">Likewise where the framing is <see cref="Framing.Type"/>; one's own from 2000 on.</param>
        protected SideChannel(Guid id, int type)
        {
            Id = id;
            Type = type;
        }

        public Guid Id { get; }

        public int Type { get; }

        /// <summary>A message has come; called within <see cref="Bridge.Exchange"/>.</summary>
        public abstract void Receive(byte[] message);

        /// <summary>Send a message with the next hand-over. Safe from many threads.</summary>
        public void Send(byte[] message)
        {
            lock (queue)
            {
                queue.Add((byte[])message.Clone());
            }
        }

        internal byte[][] TakeQueued()
        {
            lock (queue)
            {
                if (queue.Count == 0)
                {
                    return NoMessages;
                }
                byte[][] messages = queue.ToArray();
                queue.Clear();
                return messages;
            }
        }

        private static readonly byte[][] NoMessages = new byte[0][];
    }
}
