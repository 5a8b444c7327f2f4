using System;
using System.Threading;

namespace Tidemill
{
    /// <summary>A table of what agents tell in one exchange: a row per agent, filled from any thread, copied into the shared memory in one go.</summary>
    internal sealed class Rows
    {
        public readonly float[][] Observations; // per observation: rows, one after the other
        public readonly float[] Rewards;
        public readonly int[] Ids;
        public readonly byte[] Interrupted;
        public readonly byte[] Masks; // 1 = forbidden
        public int Count;
        private readonly int[] observationSizes;
        private readonly int maskSize;

        public Rows(int capacity, int[] observationSizes, int maskSize)
        {
            this.observationSizes = observationSizes;
            this.maskSize = maskSize;
            Observations = new float[observationSizes.Length][];
            for (int k = 0; k < observationSizes.Length; k++)
            {
                Observations[k] = new float[capacity * observationSizes[k]];
            }
            Rewards = new float[capacity];
            Ids = new int[capacity];
            Interrupted = new byte[capacity];
            Masks = new byte[capacity * maskSize];
        }

        /// <summary>A row of the caller's own.</summary>
        public int Take()
        {
            return Interlocked.Increment(ref Count) - 1;
        }

        /// <summary>Begin a row; all else in it is zero.</summary>
        public void Begin(int row, int agentId, byte interrupted)
        {
            Ids[row] = agentId;
            Interrupted[row] = interrupted;
        }

        /// <summary>Leave nothing for the next exchange.</summary>
        public void Clear()
        {
            int rows = Count;
            Count = 0;
            Array.Clear(Rewards, 0, rows);
            for (int k = 0; k < Observations.Length; k++)
            {
                Array.Clear(Observations[k], 0, rows * observationSizes[k]);
            }
            if (maskSize > 0)
            {
                Array.Clear(Masks, 0, rows * maskSize);
            }
        }
    }
}
