using System;
using System.Collections.Generic;

namespace Tidemill
{
    /// <summary>Layout 0: one file, one table of rows per world, the turn and a command in two bytes.</summary>
    internal sealed unsafe class Image0 : Image
    {
        private const int GroupCountSize = 4;

        /// <summary>Where the parts of a world's section lie, from the section's start.</summary>
        private sealed class Section
        {
            public readonly int Start; // from the first section
            public readonly int Count;
            public readonly int[] Observations;
            public readonly int Rewards;
            public readonly int Done;
            public readonly int Interrupted;
            public readonly int Ids;
            public readonly int Masks;
            public readonly int Actions;
            public readonly int Size;

            public Section(World world, int start)
            {
                int agents = world.MaxAgents;
                Start = start;
                Count = Layout.NameSize + 4 + 1 + 4 + 4 * world.BranchCount + 4 + 12 * world.ObservationCount;
                int offset = Count + 4;
                Observations = new int[world.ObservationCount];
                for (int k = 0; k < Observations.Length; k++)
                {
                    Observations[k] = offset;
                    offset += 4 * agents * world.ObservationSizes[k];
                }
                Rewards = offset;
                Done = Rewards + 4 * agents;
                Interrupted = Done + agents;
                Ids = Interrupted + agents;
                Masks = Ids + 4 * agents;
                Actions = Masks + agents * world.MaskSize;
                Size = Actions + 4 * agents * (world.ContinuousSize + world.BranchCount);
            }
        }

        private readonly List<Section> sections = new List<Section>();
        private Mapping file;
        private int capacity; // of the side channel, with its length

        public Image0(Mapping file)
        {
            this.file = file;
            CheckHeader();
        }

        public override IntPtr TurnWord { get { return file.At(Layout.V0.Turn, 4); } }

        public override int TurnValue { get { return file.ReadInt(Layout.V0.Turn); } }

        public override bool IsMine(int turnValue)
        {
            int turn = turnValue & 0xff;
            if (turn != Layout.SimulatorTurn && turn != Layout.TrainerTurn)
            {
                throw new CorruptMemoryException("The turn is " + turn + "; there are 0 (the trainer's) and 1 (the simulator's).");
            }
            return turn == Layout.SimulatorTurn;
        }

        public override bool Shares { get { return true; } }

        public override bool Closed { get { return Mine && file.ReadByte(Layout.V0.Command) == Layout.CommandClose; } }

        public override bool Take(out Command command)
        {
            int number = file.ReadByte(Layout.V0.Command);
            command = Command.Step;
            switch (number)
            {
                case Layout.CommandStep:
                    return true;
                case Layout.CommandReset:
                    command = Command.Reset;
                    return true;
                case Layout.CommandClose:
                    command = Command.Close;
                    return true;
                case Layout.CommandChangeFile:
                    Mapping old = file;
                    file = Mapping.Open(Next(old.Path), Layout.V0.EmptySize);
                    old.Delete();
                    CheckHeader();
                    return false;
                default:
                    throw new CorruptMemoryException("The trainer's command is " + number + "; there are 0 (step), 1 (reset), 2 (change file) and 3 (close).");
            }
        }

        /// <summary>See that the file is what the sections need; whatever is read later lies inside then.</summary>
        private void CheckHeader()
        {
            int version = file.ReadInt(Layout.V0.Version);
            int length = file.ReadInt(Layout.V0.FileLength);
            int side = file.ReadInt(Layout.V0.SideCapacity);
            long expected = Layout.V0.SideLength + (long)side + GroupCountSize + SectionsSize;
            if (version != 0 || length != file.Length || side < 4 || expected != length)
            {
                throw new CorruptMemoryException("The memory file " + file.Path + " of " + file.Length + " bytes says: version " + version + ", length " + length + ", side-channel capacity "
                    + side + "; with this simulator's worlds it should have version 0 and " + expected + " bytes.");
            }
            capacity = side;
            int groups = file.ReadInt(GroupsStart - GroupCountSize);
            if (groups != sections.Count)
            {
                throw new CorruptMemoryException("The memory file " + file.Path + " says that it has " + groups + " groups; the simulator has registered " + sections.Count + ".");
            }
        }

        private int SectionsSize
        {
            get { return sections.Count == 0 ? 0 : sections[sections.Count - 1].Start + sections[sections.Count - 1].Size; }
        }

        private int GroupsStart { get { return Layout.V0.SideLength + capacity + GroupCountSize; } }

        public override byte[] TakeChannelBytes()
        {
            int length = file.ReadInt(Layout.V0.SideLength);
            if (length < 0 || length > capacity - 4)
            {
                throw new CorruptMemoryException("The side channel says that it holds " + length + " bytes; it has room for " + (capacity - 4) + ".");
            }
            byte[] bytes = file.ReadBytes(Layout.V0.SideData, length);
            file.WriteInt(Layout.V0.SideLength, 0);
            return bytes;
        }

        public override void Prepare(byte[] channelBytes, IReadOnlyList<World> newWorlds)
        {
            foreach (World world in newWorlds)
            {
                if (world.ContinuousSize > 0 && world.BranchCount > 0)
                {
                    throw new BridgeException("The world '" + world.Name + "' has continuous and discrete actions; layout 0 takes one kind. Start the trainer with layout 0.3.2.");
                }
                Grow(capacity, world);
            }
            if (channelBytes.Length > capacity - 4)
            {
                Grow(CheckedSize(2L * channelBytes.Length + 20), null);
            }
            file.WriteInt(Layout.V0.SideLength, channelBytes.Length);
            file.Write(Layout.V0.SideData, channelBytes, 0, channelBytes.Length);
        }

        /// <summary>Go on with a larger file, which the trainer is told of through the old one.</summary>
        private void Grow(int newCapacity, World newWorld)
        {
            Section section = newWorld == null ? null : new Section(newWorld, SectionsSize);
            int length = CheckedSize((long)file.Length + newCapacity - capacity + (section == null ? 0 : section.Size));
            Mapping old = file;
            Mapping grown = Mapping.Create(Next(old.Path), length);
            int side = capacity;
            grown.Write(0, old.ReadBytes(0, Layout.V0.SideLength), 0, Layout.V0.SideLength);
            grown.WriteInt(Layout.V0.FileLength, length);
            grown.WriteInt(Layout.V0.SideCapacity, newCapacity);
            int kept = GroupCountSize + SectionsSize;
            grown.Write(Layout.V0.SideLength + newCapacity, old.ReadBytes(Layout.V0.SideLength + side, kept), 0, kept);
            file = grown;
            capacity = newCapacity;
            if (section != null)
            {
                sections.Add(section);
                Worlds.Add(newWorld);
                WriteSpecification(newWorld, GroupsStart + section.Start);
                file.WriteInt(GroupsStart - GroupCountSize, sections.Count);
            }
            old.WriteByte(Layout.V0.Command, Layout.CommandChangeFile);
            old.WriteByte(Layout.V0.Turn, Layout.TrainerTurn);
            Native.Wake(old.At(Layout.V0.Turn, 4));
            old.Dispose();
        }

        private void WriteSpecification(World world, int offset)
        {
            WriteName(file, offset, world.Name);
            offset += Layout.NameSize;
            file.WriteInt(offset, world.MaxAgents);
            bool discrete = world.BranchCount > 0;
            file.WriteByte(offset + 4, discrete ? (byte)0 : (byte)1);
            file.WriteInt(offset + 5, discrete ? world.BranchCount : world.ContinuousSize);
            offset += 9;
            for (int branch = 0; branch < world.BranchCount; branch++, offset += 4)
            {
                file.WriteInt(offset, world.BranchSize(branch));
            }
            file.WriteInt(offset, world.ObservationCount);
            offset += 4;
            for (int k = 0; k < world.ObservationCount; k++, offset += 12)
            {
                int[] shape = world.ObservationShape(k);
                file.Write(offset, shape, 0, shape.Length);
            }
        }

        public override void WriteRows()
        {
            for (int i = 0; i < sections.Count; i++)
            {
                World world = Worlds[i];
                Section section = sections[i];
                int start = GroupsStart + section.Start;
                Table* running = &world.Store->Decisions;
                Table* ended = &world.Store->Ends;
                int rows = running->Count + ended->Count;
                file.WriteInt(start + section.Count, rows);
                if (rows == 0)
                {
                    continue;
                }
                for (int k = 0; k < section.Observations.Length; k++)
                {
                    int size = 4 * world.ObservationSizes[k];
                    float* asked = Store.Observation(world.Store, running, 0, k);
                    Write(start + section.Observations[k], asked, running->Count * size, Store.Observation(world.Store, ended, 0, k), ended->Count * size);
                }
                Write(start + section.Rewards, running->Rewards, 4 * running->Count, ended->Rewards, 4 * ended->Count);
                WriteFlags(start + section.Done, running->Count, null, ended->Count);
                WriteFlags(start + section.Interrupted, running->Count, ended->Interrupted, ended->Count);
                Write(start + section.Ids, running->Ids, 4 * running->Count, ended->Ids, 4 * ended->Count);
                file.Write(start + section.Masks, running->Masks, running->Count * world.MaskSize);
                WriteFlags(start + section.Masks + running->Count * world.MaskSize, ended->Count * world.MaskSize, null, 0);
            }
        }

        private void Write(int offset, void* running, int runningBytes, void* ended, int endedBytes)
        {
            file.Write(offset, running, runningBytes);
            if (endedBytes > 0)
            {
                file.Write(offset + runningBytes, ended, endedBytes);
            }
        }

        private byte[] flags = new byte[64];

        /// <summary>Zeros for the running, then the values of the ended, or ones.</summary>
        private void WriteFlags(int offset, int zeros, byte* values, int count)
        {
            if (zeros + count > flags.Length)
            {
                flags = new byte[2 * (zeros + count)];
            }
            Array.Clear(flags, 0, zeros);
            for (int i = 0; i < count; i++)
            {
                flags[zeros + i] = values == null ? (byte)1 : values[i];
            }
            file.Write(offset, flags, 0, zeros + count);
        }

        public override void ReadActions()
        {
            for (int i = 0; i < sections.Count; i++)
            {
                World world = Worlds[i];
                int offset = GroupsStart + sections[i].Start + sections[i].Actions;
                file.Read(offset, world.ContinuousActions, world.DecisionCount * world.ContinuousSize);
                file.Read(offset, world.DiscreteActions, world.DecisionCount * world.BranchCount);
                CheckActions(world);
            }
        }

        public override void HandOver()
        {
            file.WriteByte(Layout.V0.Command, Layout.CommandStep);
            file.WriteByte(Layout.V0.Turn, Layout.TrainerTurn);
            Native.Wake(TurnWord);
        }

        public override void Close()
        {
            file.WriteByte(Layout.V0.Command, Layout.CommandClose);
            file.WriteByte(Layout.V0.Turn, Layout.TrainerTurn);
            Native.Wake(TurnWord);
        }

        public override void Delete()
        {
            file.Delete();
        }

        public override void Dispose()
        {
            file.Dispose();
        }
    }
}
