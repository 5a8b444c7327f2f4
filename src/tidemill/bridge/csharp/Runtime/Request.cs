using System;
using System.Runtime.InteropServices;

namespace Tidemill
{
    /// <summary>What an agent tells with a request; it can be set until the next exchange. All calls return the request, so that they chain.</summary>
    public readonly unsafe struct Request
    {
        private const int Few = 16; // floats that are copied sooner than the runtime's copying is called

        private readonly World world;
        private readonly bool ended;
        private readonly int row;
        private readonly int exchange;

        internal Request(World world, bool ended, int row)
        {
            this.world = world;
            this.ended = ended;
            this.row = row;
            exchange = world.Exchange;
        }

        private Table* Rows { get { return ended ? &world.Store->Ends : &world.Store->Decisions; } }

        private int Agent { get { return Rows->Ids[row]; } }

        /// <summary>What the agent earned since its last request.</summary>
        public Request SetReward(float reward)
        {
            CheckOpen();
            Rows->Rewards[row] = reward;
            return this;
        }

        /// <summary>Observation `k`, as many values as its shape has, in C order.</summary>
        public Request SetObservation(int k, params float[] values)
        {
            int size = CheckObservation(k);
            if (values.Length != size)
            {
                throw new BridgeException("The world '" + world.Name + "': observation " + k + " of agent " + Agent + " has " + size + " values, not " + values.Length + ".");
            }
            Copy(values, 0, k, size);
            return this;
        }

        /// <summary>Observation `k` from a part of an array that begins at `first`.</summary>
        public Request SetObservation(int k, float[] values, int first)
        {
            int size = CheckObservation(k);
            if (first < 0 || first > values.Length - size)
            {
                throw new BridgeException("The world '" + world.Name + "': observation " + k + " of agent " + Agent + " needs " + size + " values from " + first
                    + " on; the array has " + values.Length + ".");
            }
            Copy(values, first, k, size);
            return this;
        }

        /// <summary>Observation `k` from native memory (an engine's array of floats), copied at once; it must hold as many floats as the shape has.</summary>
        public Request SetObservationPointer(int k, IntPtr values)
        {
            int size = CheckObservation(k);
            Buffer.MemoryCopy((void*)values, Store.Observation(world.Store, Rows, row, k), 4L * size, 4L * size);
            return this;
        }

        /// <summary>Forbid (or allow again) one action of a branch.</summary>
        public Request SetActionMask(int branch, int action, bool forbidden)
        {
            int size = CheckBranch(branch);
            if (action < 0 || action >= size)
            {
                throw new BridgeException("The world '" + world.Name + "': branch " + branch + " has " + size + " actions; there is no action " + action + ".");
            }
            Rows->Masks[(long)row * world.MaskSize + world.BranchStarts[branch] + action] = forbidden ? (byte)1 : (byte)0;
            return this;
        }

        /// <summary>Which actions of a branch are forbidden, one value per action.</summary>
        public Request SetActionMask(int branch, params bool[] forbidden)
        {
            int size = CheckBranch(branch);
            if (forbidden.Length != size)
            {
                throw new BridgeException("The world '" + world.Name + "': branch " + branch + " has " + size + " actions, and its mask " + forbidden.Length + " values.");
            }
            byte* start = Rows->Masks + (long)row * world.MaskSize + world.BranchStarts[branch];
            for (int action = 0; action < size; action++)
            {
                start[action] = forbidden[action] ? (byte)1 : (byte)0;
            }
            return this;
        }

        private void Copy(float[] source, int first, int k, int count)
        {
            float* target = Store.Observation(world.Store, Rows, row, k);
            if (count > Few)
            {
                Marshal.Copy(source, first, (IntPtr)target, count);
                return;
            }
            for (int i = 0; i < count; i++)
            {
                target[i] = source[first + i];
            }
        }

        private void CheckOpen()
        {
            if (world == null || exchange != world.Exchange)
            {
                throw new BridgeException("A request can be set until the next exchange only; make a new one.");
            }
        }

        private int CheckObservation(int k)
        {
            CheckOpen();
            if (k < 0 || k >= world.ObservationSizes.Length)
            {
                throw new BridgeException("The world '" + world.Name + "' has " + world.ObservationSizes.Length + " observations; there is no observation " + k + ".");
            }
            return world.ObservationSizes[k];
        }

        private int CheckBranch(int branch)
        {
            CheckOpen();
            if (ended)
            {
                throw new BridgeException("The world '" + world.Name + "': agent " + Agent + " has ended; no action of it can be forbidden.");
            }
            if (branch < 0 || branch >= world.BranchCount)
            {
                throw new BridgeException("The world '" + world.Name + "' has " + world.BranchCount + " branches; there is no branch " + branch + ".");
            }
            return world.BranchSize(branch);
        }
    }
}
