using System;
using System.Collections.Generic;

namespace Tidemill
{
    /// <summary>Layouts 0.3.0 and 0.3.2: a header with the turns, and a body whose number goes up when it grows; decisions and ended episodes in tables of their own.</summary>
    internal sealed unsafe class Image3 : Image
    {
        /// <summary>Where the parts of a world's section lie, from the section's start.</summary>
        private sealed class Section
        {
            public readonly int Start; // from the first section
            public readonly int SpecificationSize;
            public readonly int Count;
            public readonly int[] Observations;
            public readonly int Rewards;
            public readonly int Ids;
            public readonly int Masks;
            public readonly int EndCount;
            public readonly int[] EndObservations;
            public readonly int EndRewards;
            public readonly int EndStatus;
            public readonly int EndIds;
            public readonly int Continuous;
            public readonly int Discrete;
            public readonly int Size;

            public Section(World world, int start, bool hybrid)
            {
                int agents = world.MaxAgents;
                Start = start;
                SpecificationSize = 1 + world.Name.Length + 4 + 4 + 4 * world.BranchCount + (hybrid ? 8 + 28 * world.ObservationCount : 5 + 12 * world.ObservationCount);
                int offset = SpecificationSize;
                Count = offset;
                offset += 4;
                Observations = Blocks(world, ref offset);
                Rewards = offset;
                Ids = Rewards + 4 * agents;
                Masks = Ids + 4 * agents;
                EndCount = Masks + agents * world.MaskSize;
                offset = EndCount + 4;
                EndObservations = Blocks(world, ref offset);
                EndRewards = offset;
                EndStatus = EndRewards + 4 * agents;
                EndIds = EndStatus + agents;
                Continuous = EndIds + 4 * agents;
                Discrete = Continuous + 4 * agents * world.ContinuousSize;
                Size = Discrete + 4 * agents * world.BranchCount;
            }

            private static int[] Blocks(World world, ref int offset)
            {
                var blocks = new int[world.ObservationCount];
                for (int k = 0; k < blocks.Length; k++)
                {
                    blocks[k] = offset;
                    offset += 4 * world.MaxAgents * world.ObservationSizes[k];
                }
                return blocks;
            }
        }

        private readonly List<Section> sections = new List<Section>();
        private readonly Mapping header;
        private readonly bool hybrid; // 0.3.2
        private Mapping body;
        private int number;
        private int sideBytes;

        public Image3(Mapping header, int bug)
        {
            this.header = header;
            hybrid = bug == 2;
            if (header.Length < (hybrid ? Layout.V3.HeaderSize2 : Layout.V3.HeaderSize0))
            {
                throw new CorruptMemoryException("The header " + header.Path + " of layout 0.3." + bug + " has " + header.Length + " bytes, which is too short.");
            }
            OpenBody();
        }

        public override IntPtr TurnWord { get { return header.At(Layout.V3.SimulatorBlocked, 4); } }

        public override int TurnValue { get { return header.ReadInt(Layout.V3.SimulatorBlocked); } }

        public override bool IsMine(int turnValue)
        {
            bool simulatorBlocked = (turnValue & 0xff) != 0;
            bool trainerBlocked = (turnValue & 0xff00) != 0;
            bool closed = (turnValue & 0xff << 24) != 0;
            return closed || trainerBlocked && !simulatorBlocked;
        }

        public override bool Closed { get { return header.ReadByte(Layout.V3.Closed) != 0; } }

        public override bool Take(out Command command)
        {
            command = Command.Step;
            if (Closed)
            {
                command = Command.Close;
                return true;
            }
            if (header.ReadInt(Layout.V3.BodyNumber) != number)
            {
                OpenBody();
            }
            if (header.ReadByte(Layout.V3.Reset) != 0)
            {
                header.WriteByte(Layout.V3.Reset, 0);
                command = Command.Reset;
            }
            else if (hybrid && header.ReadByte(Layout.V3.Query) != 0)
            {
                command = Command.Query;
            }
            if (hybrid)
            {
                header.WriteByte(Layout.V3.Query, 0);
            }
            return true;
        }

        /// <summary>Go on with the body that the header names, remove those before it, and see that it is what the sections need.</summary>
        private void OpenBody()
        {
            int newNumber = header.ReadInt(Layout.V3.BodyNumber);
            int side = header.ReadInt(Layout.V3.SideBytes);
            int rl = header.ReadInt(Layout.V3.RlBytes);
            if (side == 0 && rl == 0)
            {
                side = 4; // as the original trainer begins: its body has these four bytes, of which its header does not tell
            }
            if (newNumber < Math.Max(number, 1) || newNumber > 255)
            {
                throw new CorruptMemoryException("The header " + header.Path + " names body " + newNumber + " after " + number + ".");
            }
            if (side < 4)
            {
                throw new CorruptMemoryException("The header " + header.Path + " says that the side channel has room for " + side + " bytes, and 4 of them are its length.");
            }
            if (rl > 0 && sections.Count == 0)
            {
                throw new CorruptMemoryException("The header " + header.Path + " says that the groups take " + rl + " bytes; the simulator has registered none. If another simulator uses it, end that one.");
            }
            if (rl != SectionsSize)
            {
                throw new CorruptMemoryException("The header " + header.Path + " says that the groups take " + rl + " bytes; the simulator has registered " + SectionsSize + ".");
            }
            Mapping opened = Mapping.Open(header.Path + new string('_', newNumber), 4);
            if (opened.Length < (long)side + rl)
            {
                opened.Dispose();
                throw new CorruptMemoryException("The body " + opened.Path + " has " + opened.Length + " bytes; the header says " + side + " for side channels and " + rl + " for groups.");
            }
            if (body != null)
            {
                body.Dispose();
                for (; number < newNumber; number++)
                {
                    Mapping.Remove(header.Path + new string('_', number));
                }
            }
            body = opened;
            number = newNumber;
            sideBytes = side;
        }

        private int SectionsSize
        {
            get { return sections.Count == 0 ? 0 : sections[sections.Count - 1].Start + sections[sections.Count - 1].Size; }
        }

        public override byte[] TakeChannelBytes()
        {
            int length = body.ReadInt(0);
            if (length < 0 || length > sideBytes - 4)
            {
                throw new CorruptMemoryException("The side channel says that it holds " + length + " bytes; it has room for " + (sideBytes - 4) + ".");
            }
            byte[] bytes = body.ReadBytes(4, length);
            body.WriteInt(0, 0);
            return bytes;
        }

        public override void Prepare(byte[] channelBytes, IReadOnlyList<World> newWorlds)
        {
            foreach (World world in newWorlds)
            {
                if (!hybrid && world.ContinuousSize > 0 && world.BranchCount > 0)
                {
                    throw new BridgeException("The world '" + world.Name + "' has continuous and discrete actions; layout 0.3.0 takes one kind. Start the trainer with layout 0.3.2.");
                }
            }
            int side = channelBytes.Length > sideBytes - 4 ? CheckedSize(2L * channelBytes.Length + 20) : sideBytes;
            if (newWorlds.Count > 0 || side != sideBytes)
            {
                Grow(side, newWorlds);
            }
            body.WriteInt(0, channelBytes.Length);
            body.Write(4, channelBytes, 0, channelBytes.Length);
        }

        /// <summary>Go on with a larger body; the trainer sees its number at the next turn, and removes the one before.</summary>
        private void Grow(int newSide, IReadOnlyList<World> newWorlds)
        {
            var added = new List<Section>();
            long size = SectionsSize;
            foreach (World world in newWorlds)
            {
                var section = new Section(world, CheckedSize(size), hybrid);
                added.Add(section);
                size += section.Size;
            }
            int length = CheckedSize(size + newSide);
            Mapping grown = Mapping.Create(Next(body.Path), length);
            grown.Write(newSide, body.ReadBytes(sideBytes, SectionsSize), 0, SectionsSize);
            for (int i = 0; i < added.Count; i++)
            {
                WriteSpecification(grown, newWorlds[i], newSide + added[i].Start);
            }
            body.Dispose();
            body = grown;
            sections.AddRange(added);
            Worlds.AddRange(newWorlds);
            sideBytes = newSide;
            number++;
            header.WriteInt(Layout.V3.SideBytes, newSide);
            header.WriteInt(Layout.V3.RlBytes, (int)size);
            header.WriteInt(Layout.V3.BodyNumber, number);
        }

        private void WriteSpecification(Mapping file, World world, int offset)
        {
            WriteName(file, offset, world.Name);
            offset += 1 + world.Name.Length;
            file.WriteInt(offset, world.MaxAgents);
            offset += 4;
            if (!hybrid)
            {
                bool discrete = world.BranchCount > 0;
                file.WriteByte(offset, discrete ? (byte)0 : (byte)1);
                file.WriteInt(offset + 1, discrete ? world.BranchCount : world.ContinuousSize);
                offset += 5;
                WriteBranches(file, world, ref offset);
            }
            file.WriteInt(offset, world.ObservationCount);
            offset += 4;
            for (int k = 0; k < world.ObservationCount; k++)
            {
                int[] shape = world.ObservationShape(k);
                file.Write(offset, shape, 0, shape.Length);
                offset += hybrid ? 28 : 12; // with a property of each dimension and a type: zeros, nothing special
            }
            if (hybrid)
            {
                file.WriteInt(offset, world.ContinuousSize);
                file.WriteInt(offset + 4, world.BranchCount);
                offset += 8;
                WriteBranches(file, world, ref offset);
            }
        }

        private static void WriteBranches(Mapping file, World world, ref int offset)
        {
            for (int branch = 0; branch < world.BranchCount; branch++, offset += 4)
            {
                file.WriteInt(offset, world.BranchSize(branch));
            }
        }

        public override void WriteRows()
        {
            for (int i = 0; i < sections.Count; i++)
            {
                World world = Worlds[i];
                Section section = sections[i];
                int start = sideBytes + section.Start;
                Table* running = &world.Store->Decisions;
                body.WriteInt(start + section.Count, running->Count);
                WriteRows(world, running, start, section.Observations, section.Rewards, section.Ids);
                body.Write(start + section.Masks, running->Masks, running->Count * world.MaskSize);
                Table* ended = &world.Store->Ends;
                body.WriteInt(start + section.EndCount, ended->Count);
                WriteRows(world, ended, start, section.EndObservations, section.EndRewards, section.EndIds);
                body.Write(start + section.EndStatus, ended->Interrupted, ended->Count);
            }
        }

        private void WriteRows(World world, Table* rows, int start, int[] observations, int rewards, int ids)
        {
            for (int k = 0; k < observations.Length; k++)
            {
                body.Write(start + observations[k], Store.Observation(world.Store, rows, 0, k), 4 * rows->Count * world.ObservationSizes[k]);
            }
            body.Write(start + rewards, rows->Rewards, 4 * rows->Count);
            body.Write(start + ids, rows->Ids, 4 * rows->Count);
        }

        public override void ReadActions()
        {
            for (int i = 0; i < sections.Count; i++)
            {
                World world = Worlds[i];
                int start = sideBytes + sections[i].Start;
                body.Read(start + sections[i].Continuous, world.ContinuousActions, world.DecisionCount * world.ContinuousSize);
                body.Read(start + sections[i].Discrete, world.DiscreteActions, world.DecisionCount * world.BranchCount);
                CheckActions(world);
            }
        }

        public override void HandOver()
        {
            header.WriteByte(Layout.V3.SimulatorBlocked, 1);
            header.WriteByte(Layout.V3.TrainerBlocked, 0);
            Native.Wake(TurnWord);
        }

        public override void Close()
        {
            header.WriteByte(Layout.V3.Closed, 1);
            HandOver();
        }

        public override void Delete()
        {
            header.Delete();
            body.Delete();
        }

        public override void Dispose()
        {
            header.Dispose();
            body.Dispose();
        }
    }
}
