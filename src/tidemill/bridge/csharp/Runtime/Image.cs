using System;
using System.Collections.Generic;
using System.Text;
using System.Threading;

namespace Tidemill
{
    internal enum Command
    {
        Step,
        Reset,
        Query,
        Close,
    }

    /// <summary>The shared memory as one layout has it: turns, side-channel bytes, and the worlds' sections, in order of registration.</summary>
    internal abstract class Image : IDisposable
    {
        protected readonly List<World> Worlds = new List<World>();

        /// <summary>Map the trainer's file and see which layout it has.</summary>
        public static Image Open(string path)
        {
            Mapping file = Mapping.Open(path, Layout.V0.EmptySize);
            try
            {
                int first = file.ReadInt(Layout.V3.Major);
                int second = file.ReadInt(Layout.V3.Minor);
                int third = file.ReadInt(Layout.V3.Bug);
                if (first == 0 && second == 3 && (third == 0 || third == 2))
                {
                    return new Image3(file, third);
                }
                if (second == 0)
                {
                    return new Image0(file);
                }
                throw new BridgeException("The memory file " + path + " is of no layout that this bridge knows (0, 0.3.0, 0.3.2): it begins with " + first + ", " + second + ", " + third
                    + ". Trainer and simulator should use versions of Tidemill that fit.");
            }
            catch
            {
                file.Dispose();
                throw;
            }
        }

        /// <summary>The four bytes that change when the turn does; both sides sleep on them.</summary>
        public abstract IntPtr TurnWord { get; }

        public abstract int TurnValue { get; }

        /// <summary>Whether it is the simulator's turn when those bytes are this value.</summary>
        public abstract bool IsMine(int turnValue);

        public bool Mine
        {
            get
            {
                bool mine = IsMine(TurnValue);
                Thread.MemoryBarrier(); // what is read next was written before the turn
                return mine;
            }
        }

        /// <summary>Whether the trainer has closed the bridge.</summary>
        public abstract bool Closed { get; }

        /// <summary>What the trainer wants of this turn; false if it has only moved on to another file, where the turn is still its own.</summary>
        public abstract bool Take(out Command command);

        public abstract byte[] TakeChannelBytes();

        /// <summary>Make room for these bytes and for these new worlds, and write the bytes.</summary>
        public abstract void Prepare(byte[] channelBytes, IReadOnlyList<World> newWorlds);

        public abstract void WriteRows();

        public abstract void ReadActions();

        /// <summary>Give the turn to the trainer.</summary>
        public abstract void HandOver();

        /// <summary>Tell the trainer that the simulator ends.</summary>
        public abstract void Close();

        /// <summary>Remove the files, which the trainer has left.</summary>
        public abstract void Delete();

        public abstract void Dispose();

        /// <summary>Whether decisions and ends share the rows of a world.</summary>
        public virtual bool Shares { get { return false; } }

        /// <summary>The larger file's name.</summary>
        protected static string Next(string path)
        {
            string name = path + "_";
            if (System.IO.Path.GetFileName(name).Length > 255)
            {
                throw new BridgeException("The memory file " + path + " cannot grow any more: each growth adds a character to its name, which has 255 at most. "
                    + "Register all worlds before the first exchange, and send shorter side-channel messages.");
            }
            return name;
        }

        protected static void WriteName(Mapping file, int offset, string name)
        {
            byte[] characters = Encoding.ASCII.GetBytes(name);
            file.WriteByte(offset, (byte)characters.Length);
            file.Write(offset + 1, characters, 0, characters.Length);
        }

        /// <summary>Section size so far, as 64 bits; a file that would pass 2 GiB is refused before anything is made.</summary>
        protected static int CheckedSize(long size)
        {
            if (size > int.MaxValue)
            {
                throw new BridgeException("The memory file would take " + size + " bytes; it has 2 GiB at most. Use fewer agents or smaller observations.");
            }
            return (int)size;
        }

        /// <summary>Refuse actions that mean nothing, naming whose they are.</summary>
        protected static void CheckActions(World world)
        {
            int rows = world.DecisionCount;
            for (int i = 0; i < rows * world.ContinuousSize; i++)
            {
                float value = world.ContinuousActions[i];
                if (float.IsNaN(value) || float.IsInfinity(value))
                {
                    throw new CorruptMemoryException("The trainer's continuous action " + (i % world.ContinuousSize) + " for agent " + world.Deciding(i / world.ContinuousSize)
                        + " of '" + world.Name + "' is " + value + ".");
                }
            }
            int branch = 0;
            for (int i = 0; i < rows * world.BranchCount; i++)
            {
                int action = world.DiscreteActions[i];
                if ((uint)action >= (uint)world.BranchSize(branch))
                {
                    throw new CorruptMemoryException("The trainer's action for agent " + world.Deciding(i / world.BranchCount) + " of '" + world.Name + "' is " + action + " in branch "
                        + branch + ", which has " + world.BranchSize(branch) + " actions.");
                }
                branch = branch + 1 == world.BranchCount ? 0 : branch + 1;
            }
        }
    }
}
