using System;
using System.Runtime.InteropServices;
using System.Threading;

namespace Tidemill
{
    /// <summary>Rows of agents that ask, or of agents that end: arrays in memory that no collector moves. Filled from any thread.</summary>
    internal unsafe struct Table
    {
        public int Attempts; // rows that were asked for; there may be more than there is room for, for an instant
        public int Count;
        public float* Observations; // a block per observation, rows one after the other
        public float* Rewards;
        public int* Ids;
        public byte* Interrupted;
        public byte* Masks; // 1 = forbidden
    }

    /// <summary>What jobs got wrong; they cannot throw, and so the next exchange does.</summary>
    internal enum Fault
    {
        None,
        Full,
        Stale,
        NoObservation,
        WrongSize,
        NoAction,
        MaskOfEnded,
        NoChoice,
    }

    /// <summary>What a world tells and is told between two exchanges, without any reference, so that jobs and Burst take a pointer to it. Freed with its world.</summary>
    internal unsafe struct Store
    {
        private static readonly byte[] Zeros = new byte[1 << 14];

        public int MaxAgents;
        public int ObservationCount;
        public int ContinuousSize;
        public int BranchCount;
        public int MaskSize;
        public int Shared; // 1: decisions and ends have room for MaxAgents together, as in layout 0
        public int Exchange; // requests made before the last one cannot be changed any more
        public int Fault;
        public int FaultAgent;
        public int FaultValue;
        public int Acting;
        public int* ObservationSizes;
        public int* ObservationStarts; // floats of one agent before it
        public int* BranchStarts; // choices before it; one more than there are branches
        public Table Decisions;
        public Table Ends;
        public float* Continuous;
        public int* Discrete;
        public int* ActingIds;

        /// <summary>Make one, all zero.</summary>
        public static Store* Make(int maxAgents, int[] observationSizes, int continuousSize, int[] branches)
        {
            long floats = 0;
            long choices = 0;
            foreach (int size in observationSizes)
            {
                floats += size;
            }
            foreach (int size in branches)
            {
                choices += size;
            }
            long words = 2 * observationSizes.Length + branches.Length + 1 + (long)maxAgents * (2 * floats + 2 + 2 + 1 + continuousSize + branches.Length);
            long bytes = sizeof(Store) + 4 * words + maxAgents * (2 + 2 * choices);
            var store = (Store*)Marshal.AllocHGlobal(new IntPtr(bytes));
            Clear(store, bytes);
            store->MaxAgents = maxAgents;
            store->ObservationCount = observationSizes.Length;
            store->ContinuousSize = continuousSize;
            store->BranchCount = branches.Length;
            store->MaskSize = (int)choices;
            byte* at = (byte*)(store + 1);
            store->ObservationSizes = (int*)Part(ref at, 4L * observationSizes.Length);
            store->ObservationStarts = (int*)Part(ref at, 4L * observationSizes.Length);
            store->BranchStarts = (int*)Part(ref at, 4L * (branches.Length + 1));
            for (int k = 0, start = 0; k < observationSizes.Length; start += observationSizes[k++])
            {
                store->ObservationSizes[k] = observationSizes[k];
                store->ObservationStarts[k] = start;
            }
            for (int b = 0; b < branches.Length; b++)
            {
                store->BranchStarts[b + 1] = store->BranchStarts[b] + branches[b];
            }
            foreach (bool ended in new[] { false, true })
            {
                Table* table = ended ? &store->Ends : &store->Decisions;
                table->Observations = (float*)Part(ref at, 4 * floats * maxAgents);
                table->Rewards = (float*)Part(ref at, 4L * maxAgents);
                table->Ids = (int*)Part(ref at, 4L * maxAgents);
            }
            store->Continuous = (float*)Part(ref at, 4L * maxAgents * continuousSize);
            store->Discrete = (int*)Part(ref at, 4L * maxAgents * branches.Length);
            store->ActingIds = (int*)Part(ref at, 4L * maxAgents);
            foreach (bool ended in new[] { false, true })
            {
                Table* table = ended ? &store->Ends : &store->Decisions;
                table->Interrupted = Part(ref at, maxAgents);
                table->Masks = Part(ref at, maxAgents * choices);
            }
            return store;
        }

        private static byte* Part(ref byte* at, long bytes)
        {
            byte* part = at;
            at += bytes;
            return part;
        }

        /// <summary>A row of the caller's own, begun for an agent; -1 where there is no room. From any thread.</summary>
        public static int Take(Store* store, Table* table, int agentId, byte interrupted)
        {
            Table* guard = store->Shared != 0 ? &store->Decisions : table;
            if (Interlocked.Increment(ref guard->Attempts) > store->MaxAgents)
            {
                Interlocked.Decrement(ref guard->Attempts);
                return -1;
            }
            int row = Interlocked.Increment(ref table->Count) - 1;
            table->Ids[row] = agentId;
            table->Interrupted[row] = interrupted;
            return row;
        }

        /// <summary>Where observation `k` of a row begins.</summary>
        public static float* Observation(Store* store, Table* table, int row, int k)
        {
            return table->Observations + (long)store->ObservationStarts[k] * store->MaxAgents + (long)row * store->ObservationSizes[k];
        }

        /// <summary>Note what a job got wrong; the first of it is kept.</summary>
        public static void Note(Store* store, Fault fault, int agent, int value)
        {
            if (Interlocked.CompareExchange(ref store->Fault, (int)fault, 0) == 0)
            {
                store->FaultAgent = agent;
                store->FaultValue = value;
            }
        }

        /// <summary>Leave nothing of the requests for the next exchange.</summary>
        public static void Drop(Store* store)
        {
            Drop(store, &store->Decisions);
            Drop(store, &store->Ends);
            store->Exchange++;
        }

        private static void Drop(Store* store, Table* table)
        {
            int rows = table->Count;
            table->Count = 0;
            table->Attempts = 0;
            Clear(table->Rewards, 4L * rows);
            for (int k = 0; k < store->ObservationCount; k++)
            {
                Clear(Observation(store, table, 0, k), 4L * rows * store->ObservationSizes[k]);
            }
            Clear(table->Masks, (long)rows * store->MaskSize);
        }

        private static void Clear(void* start, long bytes)
        {
            for (long at = 0; at < bytes; at += Zeros.Length)
            {
                Marshal.Copy(Zeros, 0, new IntPtr((byte*)start + at), (int)Math.Min(Zeros.Length, bytes - at));
            }
        }
    }
}
