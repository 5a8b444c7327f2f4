using System;
using System.IO;
using System.Text;

namespace Tidemill
{
    /// <summary>Builds a side channel's message. Little-endian; a text is its length and its ASCII characters.</summary>
    public sealed class MessageWriter
    {
        private readonly MemoryStream bytes = new MemoryStream();

        public MessageWriter Boolean(bool value)
        {
            bytes.WriteByte(value ? (byte)1 : (byte)0);
            return this;
        }

        public MessageWriter Integer(int value)
        {
            bytes.Write(Bytes(value), 0, 4);
            return this;
        }

        public MessageWriter Number(float value)
        {
            bytes.Write(LittleEndian(BitConverter.GetBytes(value)), 0, 4);
            return this;
        }

        public MessageWriter Numbers(params float[] values)
        {
            Integer(values.Length);
            foreach (float value in values)
            {
                Number(value);
            }
            return this;
        }

        public MessageWriter Text(string text)
        {
            foreach (char character in text)
            {
                if (character > 127)
                {
                    throw new BridgeException("The text '" + text + "' is not ASCII; side channels carry nothing else.");
                }
            }
            byte[] characters = Encoding.ASCII.GetBytes(text);
            Integer(characters.Length);
            bytes.Write(characters, 0, characters.Length);
            return this;
        }

        public byte[] ToArray()
        {
            return bytes.ToArray();
        }

        internal static byte[] Bytes(int value)
        {
            return LittleEndian(BitConverter.GetBytes(value));
        }

        internal static byte[] LittleEndian(byte[] number)
        {
            if (!BitConverter.IsLittleEndian)
            {
                Array.Reverse(number);
            }
            return number;
        }
    }

    /// <summary>Takes a side channel's message apart; <see cref="ChannelException"/> where the bytes are not what is asked for.</summary>
    public sealed class MessageReader
    {
        private readonly byte[] data;
        private readonly string channel;
        private int at;

        /// <param name="channel">What errors call it.</param>
        public MessageReader(byte[] data, string channel)
        {
            this.data = data;
            this.channel = channel;
        }

        public int Left { get { return data.Length - at; } }

        public byte[] Bytes(int count)
        {
            if (count < 0 || count > Left)
            {
                throw Wrong(count + " bytes are announced where " + Left + " are left");
            }
            var bytes = new byte[count];
            Buffer.BlockCopy(data, at, bytes, 0, count);
            at += count;
            return bytes;
        }

        public bool Boolean()
        {
            byte value = Bytes(1)[0];
            if (value > 1)
            {
                throw Wrong("a truth value is " + value);
            }
            return value == 1;
        }

        public int Integer()
        {
            return BitConverter.ToInt32(MessageWriter.LittleEndian(Bytes(4)), 0);
        }

        public float Number()
        {
            float value = BitConverter.ToSingle(MessageWriter.LittleEndian(Bytes(4)), 0);
            if (float.IsNaN(value) || float.IsInfinity(value))
            {
                throw Wrong("a number is " + value);
            }
            return value;
        }

        public float[] Numbers()
        {
            int count = Integer();
            if (count < 0 || count > Left / 4)
            {
                throw Wrong(count + " numbers are announced where " + Left + " bytes are left");
            }
            var numbers = new float[count];
            for (int i = 0; i < count; i++)
            {
                numbers[i] = Number();
            }
            return numbers;
        }

        public string Text()
        {
            byte[] characters = Bytes(Integer());
            foreach (byte character in characters)
            {
                if (character > 127)
                {
                    throw Wrong("a text is not ASCII");
                }
            }
            return Encoding.ASCII.GetString(characters);
        }

        /// <summary>Nothing may be left.</summary>
        public void End()
        {
            if (Left > 0)
            {
                throw Wrong(Left + " bytes are left over");
            }
        }

        /// <summary>An error that names the channel.</summary>
        public ChannelException Wrong(string what)
        {
            return new ChannelException("The message of " + channel + " is not as it should be: " + what + ".");
        }
    }
}
